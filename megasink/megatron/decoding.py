"""Generation with Megatron's static inference: its KV cache, megasink's core attention.

Megatron's own loop (TextGenerationController) requires CUDA events and tensors, and its
StaticInferenceEngine delegates to dynamic batching. This loop runs on every platform and reports
each token as soon as it is sampled.

Shapes: B sequences, S tokens including the prompt, V rows of the vocabulary.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from megasink.errors import UserError
from megasink.megatron.hybrid_pattern import MAMBA, RECURRENT, layers_of
from megasink.megatron.sampling import Sampling, next_tokens


@dataclass(frozen=True)
class Generated:
    """The result of :func:`generate`: each sequence's new tokens, and both phases over all of them.

    `tokens` include the end-of-document token if it was reached; seconds include sampling.
    """

    tokens: list[list[int]]
    prefill_tokens: int
    decode_tokens: int
    prefill_seconds: float
    decode_seconds: float


@torch.inference_mode()
def generate(
    model: HybridModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    vocabulary: int,
    ends: Collection[int] = (),
    on_token: Callable[[int, int], None] | None = None,
    on_logits: Callable[[Tensor], None] | None = None,
) -> Generated:
    """Continue prompts of different lengths as one batch with a KV cache and delta-net states.

    The prefill covers the length of the shortest prompt. Each later step appends one token to every
    sequence: the next prompt token while its prompt lasts, then a sampled one. Nothing is padded,
    so all positions are exact. Works with tensor and pipeline parallelism; every rank returns the
    result.

    Args:
        model: Pipeline stage of this rank.
        prompts: Non-empty lists of token ids.
        max_new_tokens: Limit per sequence.
        sampling: Same on every rank.
        vocabulary: See `next_tokens`.
        ends: Tokens after which a sequence stops.
        on_token: Called with (sequence, token) for every new token.
        on_logits: Called with the logits [B, V] of every step, on the last pipeline stage.

    Raises:
        UserError: Sequence or context parallelism is on; a single token cannot be split. Or the
            model has Mamba layers.
        ValueError: There are no prompts, an empty prompt, or no tokens to generate.
    """
    if model.config.sequence_parallel:
        raise UserError("drop --sequence-parallel: generation cannot split a single token")
    if model.config.context_parallel_size > 1:
        raise UserError(
            "use --context-parallel-size 1, which loads the same checkpoint: generation cannot "
            "split a single token"
        )
    if MAMBA in layers_of(model.hybrid_layer_pattern):
        raise UserError(
            f"generation has no cache for the state of {RECURRENT[MAMBA]} layers: use megasink "
            "analyze"
        )
    if not prompts or not all(prompts) or max_new_tokens < 1:
        raise ValueError(
            "prompts must not be missing or empty, and max_new_tokens must be 1 or more"
        )
    device = next(model.parameters()).device
    lengths = [len(prompt) for prompt in prompts]
    total = max(lengths) + max_new_tokens
    tokens_BS = torch.zeros(len(prompts), total, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, : len(prompt)] = torch.tensor(prompt, device=device)
    new: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    stage = _Stage(model, len(prompts), total, sampling, vocabulary)
    start, stop, began, prefilled = 0, min(lengths), time.perf_counter(), 0.0
    training = model.training
    with InferenceMode.active():
        while open_rows:
            sampled = stage.step(tokens_BS, start, stop, on_logits)
            for row in sorted(open_rows):
                if stop < lengths[row]:
                    continue  # still within its prompt
                tokens_BS[row, stop] = sampled[row]
                new[row].append(sampled[row])
                if on_token is not None:
                    on_token(row, sampled[row])
                if sampled[row] in ends or len(new[row]) == max_new_tokens:
                    open_rows.remove(row)
            if start == 0:
                prefilled = time.perf_counter()
            start, stop = stop, stop + 1
    model.train(training)
    return Generated(
        tokens=new,
        prefill_tokens=min(lengths) * len(prompts),
        decode_tokens=(start - min(lengths)) * len(prompts),
        prefill_seconds=prefilled - began,
        decode_seconds=time.perf_counter() - prefilled,
    )


class _Stage:
    """The pipeline stage of this rank with its KV cache."""

    def __init__(
        self, model: HybridModel, batch: int, length: int, sampling: Sampling, vocabulary: int
    ):
        self.wrapper = GPTInferenceWrapper(model, StaticInferenceContext(batch, length))
        self.wrapper.prep_model_for_inference()
        self.sampling, self.vocabulary = sampling, vocabulary
        device = next(model.parameters()).device
        self.generator = torch.Generator(device=device).manual_seed(sampling.seed)

    def step(
        self, tokens_BS: Tensor, start: int, stop: int, on_logits: Callable[[Tensor], None] | None
    ) -> list[int]:
        """Run tokens [start, stop) through the model and sample one token per sequence."""
        window_BS = tokens_BS[:, start:stop]
        positions_S = torch.arange(start, stop, device=tokens_BS.device)
        logits_B1V = self.wrapper.run_one_forward_step(
            {
                "tokens": window_BS,
                "position_ids": positions_S.expand_as(window_BS),
                "attention_mask": None,  # core attention is always causal
            }
        )
        sampled_B = torch.zeros_like(tokens_BS[:, 0])
        if logits_B1V is not None:
            logits_BV = logits_B1V[:, -1]
            if on_logits is not None:
                on_logits(logits_BV)
            sampled_B = next_tokens(logits_BV, self.sampling, self.generator, self.vocabulary)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            torch.distributed.broadcast(
                sampled_B,
                parallel_state.get_pipeline_model_parallel_last_rank(),
                parallel_state.get_pipeline_model_parallel_group(),
            )
        return sampled_B.tolist()
