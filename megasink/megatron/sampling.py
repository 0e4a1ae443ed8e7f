"""Sampling of the next token from logits.

Shapes: B sequences, V rows of the vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: temperature 0 is greedy, top_k 0 and top_p 1 allow all tokens.

    top_p, the smallest set of most likely tokens with this total probability, applies after top_k.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234


def next_tokens(
    logits_BV: Tensor, sampling: Sampling, generator: torch.Generator, vocabulary: int
) -> Tensor:
    """Sample one token per row: [B].

    Rows from `vocabulary` on are untrained padding of the embedding, and never sampled.
    """
    logits_BV = logits_BV[:, :vocabulary].float()
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    ranked_BV, tokens_BV = torch.sort(logits_BV, dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ranked_BV = ranked_BV[:, : sampling.top_k]
    probability_BV = torch.softmax(ranked_BV / sampling.temperature, -1)
    # Keep a token while the ones before it sum to less than p; the first is always kept.
    before_BV = probability_BV.cumsum(-1) - probability_BV
    probability_BV = probability_BV.masked_fill(before_BV >= sampling.top_p, 0.0)
    chosen_B1 = torch.multinomial(probability_BV, 1, generator=generator)
    return tokens_BV.gather(-1, chosen_B1)[:, 0]
