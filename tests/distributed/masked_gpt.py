"""Tasks for the workers: the tiny GPT over packed documents, padded rows or prefixes.

Shapes: B microbatch, S sequence, T = B * S.
"""

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_model_config,
)
from torch import Tensor

from megasink.megatron.microbatch_documents import Documents, row_of_documents
from megasink.training.build_datasets import without_prefix
from megasink.training.forward_step import enter_stage, leave_stage, pack
from tests.distributed import tiny_gpt


def batch(
    step: int, index: int, masked: bool = False, ends: Any = None, real: Any = None, prefix: int = 0
) -> dict[str, Any]:
    """A microbatch as the data loader gives it.

    Args:
        masked: of :func:`tiny_gpt.batch`.
        ends: of each sample, the ends of its documents; None for one document.
        real: of each microbatch, the tokens of its samples before the padding; None for all.
        prefix: tokens whose targets do not count.
    """
    data: dict[str, Any] = tiny_gpt.batch(step, index, masked)
    length = tiny_gpt.SEQUENCE
    if ends is not None:
        rows = [[0, *row] + [length] * (length - len(row)) for row in ends]
        data["cu_seqlens"] = torch.tensor(rows, dtype=torch.int32)
        data["position_ids"] = data["position_ids"].clone()
        for row, stops in zip(data["position_ids"], ends, strict=True):
            for start, stop in pairwise([0, *stops]):
                row[start:stop] = torch.arange(stop - start)
    counts = [length] * tiny_gpt.MICROBATCH if real is None else real[index]
    data["real_tokens"] = torch.tensor(counts)
    for row, tokens in zip(data["loss_mask"], counts, strict=True):
        row[tokens:] = 0.0
    data["loss_mask"] = without_prefix(data["loss_mask"], prefix)
    return data


def with_padding(row: Documents, real: list[int]) -> Documents:
    """The documents of a row whose samples end with padding, as a host that pads them gives it."""
    length, group = tiny_gpt.SEQUENCE, tiny_gpt.parallel_state.get_context_parallel_group()
    starts = [length * index for index in range(len(real))]
    padding = [(a + n, a + length) for a, n in zip(starts, real, strict=True) if n < length]
    ranks, rank = group.size(), group.rank()
    return row_of_documents(
        row.cu_seqlens, padding, device=torch.device("cpu"), ranks=ranks, rank=rank
    )


def train(
    masked: bool = False, ends: Any = None, real: Any = None, **options: Any
) -> dict[str, Any]:
    """What :func:`tiny_gpt.train` reports, with megasink.training.forward_step."""
    with reading(masked, ends, real, options.get("prefix_lm_tokens", 0)):
        return tiny_gpt.train(**options)


@contextlib.contextmanager
def reading(
    masked: bool = False, ends: Any = None, real: Any = None, prefix: int = 0
) -> Iterator[None]:
    """Let the steps of :mod:`tiny_gpt` read these batches."""

    def forward_step(iterator: Iterator[tuple[int, int]], model: Any) -> tuple[Tensor, Any]:
        data = batch(*next(iterator), masked, ends, real, prefix)
        config, targets = get_model_config(model), data["loss_mask"].sum()
        balance, counts = config.statistics, data.pop("real_tokens")
        balance.set_targets(targets)
        packed = pack(data)
        if packed is not None:
            packed.documents = with_padding(packed.documents, counts.tolist())
            enter_stage(model)
        else:
            data["real"] = torch.arange(tiny_gpt.SEQUENCE) < counts[:, None]
            data = get_batch_on_this_cp_rank(
                data,
                is_hybrid_cp=False,
                cp_group=tiny_gpt.parallel_state.get_context_parallel_group(),
            )
            balance.set_real_tokens(None if real is None else data["real"], int(counts.sum()))
        output = model(
            data["tokens"],
            data["position_ids"],
            None,
            labels=data["labels"],
            packed_seq_params=packed,
        )
        if packed is not None and not get_attr_wrapped_model(model, "post_process"):
            output = leave_stage(output, tiny_gpt.MICROBATCH)
        loss = tiny_gpt.loss_function(data["loss_mask"], targets, config.calculate_per_token_loss)
        return balance.keep(output), loss

    def microbatches(step: int, masked: bool) -> Iterator[tuple[int, int]]:
        state = tiny_gpt.parallel_state
        size, rank = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
        yield from ((step, index) for index in range(rank, tiny_gpt.MICROBATCHES, size))

    with (
        mock.patch.object(tiny_gpt, "forward_step", forward_step),
        mock.patch.object(tiny_gpt, "microbatches", microbatches),
    ):
        yield
