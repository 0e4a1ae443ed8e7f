"""The next token from the logits of the last one.

Shapes: B sequences, V rows of the vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample among the k most likely tokens; 0 for all.
        top_p: sample among the fewest most likely tokens whose probabilities reach p, after top_k;
            1 for all.
        seed: of the draws.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234


def next_tokens(
    logits_BV: Tensor, sampling: Sampling, generator: torch.Generator, vocabulary: int
) -> Tensor:
    """One token for each row [B].

    Args:
        vocabulary: tokens of the tokenizer; the rows that pad the embedding were never trained and
            are never chosen.
    """
    logits_BV = logits_BV[:, :vocabulary].float()
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    ranked_BV, tokens_BV = torch.sort(logits_BV, dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ranked_BV = ranked_BV[:, : sampling.top_k]
    probability_BV = torch.softmax(ranked_BV / sampling.temperature, -1)
    # A token counts while those before it have not reached p: the first one always does.
    before_BV = probability_BV.cumsum(-1) - probability_BV
    probability_BV = probability_BV.masked_fill(before_BV >= sampling.top_p, 0.0)
    chosen_B1 = torch.multinomial(probability_BV, 1, generator=generator)
    return tokens_BV.gather(-1, chosen_B1)[:, 0]
