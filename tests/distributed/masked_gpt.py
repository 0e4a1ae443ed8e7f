"""Tasks for the workers: the tiny GPT over packed documents, or as a prefix language model.

Shapes: B microbatch, S sequence, T = B * S, H query heads.
"""

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from types import MethodType
from typing import Any
from unittest import mock

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from megasink.attention import reference_attention
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.documents import Documents, row_of_documents
from megasink.megatron.model import MegasinkModelBuilder
from megasink.training.dataset import without_prefix
from megasink.training.packing import enter_stage, leave_stage, pack
from tests.distributed import oracle, tiny_gpt

# Of each sample: the ends of its documents. One of a single token, two of one length. The row of
# both samples is split at 16, 32 and 48 over two ranks: inside documents and between two.
ENDS = ([5, 6, 18, 32], [13, 25, 32])

# Tokens before the padding, of the samples of each microbatch. In the last microbatch the third of
# four context-parallel ranks has neither tokens nor targets.
REAL = ((27, 31), (22, 24), (32, 28), (12, 6))


def batch(
    step: int, index: int, documents: bool, masked: bool = False, padded: bool = False
) -> dict[str, Any]:
    """A microbatch as the data loader gives it.

    Args:
        masked: of :func:`tiny_gpt.batch`.
        padded: samples end with padding, more in some microbatches than in others: inside a
            document, and whole documents.
    """
    data: dict[str, Any] = tiny_gpt.batch(step, index, masked)
    if documents:
        length = tiny_gpt.SEQUENCE
        rows = [[0, *ends] + [length] * (length - len(ends)) for ends in ENDS]
        data["cu_seqlens"] = torch.tensor(rows, dtype=torch.int32)
        data["position_ids"] = data["position_ids"].clone()
        for row, ends in zip(data["position_ids"], ENDS, strict=True):
            for start, stop in pairwise([0, *ends]):
                row[start:stop] = torch.arange(stop - start)
    real = REAL[index] if padded else (tiny_gpt.SEQUENCE,) * 2
    data["real_tokens"] = torch.tensor(real)
    for row, tokens in zip(data["loss_mask"], real, strict=True):
        row[tokens:] = 0.0
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
    documents: bool = False, masked: bool = False, padded: bool = False, **options: Any
) -> dict[str, Any]:
    """What :func:`tiny_gpt.train` reports, with the forward step of megasink.training.forward."""
    with reading(documents, masked, padded, options.get("prefix_lm_tokens", 0)):
        return tiny_gpt.train(**options)


@contextlib.contextmanager
def reading(
    documents: bool, masked: bool = False, padded: bool = False, prefix: int = 0
) -> Iterator[None]:
    """Let the steps of :mod:`tiny_gpt` read these batches."""

    def forward_step(iterator: Iterator[tuple[int, int]], model: Any) -> tuple[Tensor, Any]:
        data = batch(*next(iterator), documents, masked, padded)
        data["loss_mask"] = without_prefix(data["loss_mask"], prefix)
        config, targets = get_model_config(model), data["loss_mask"].sum()
        balance = config.statistics
        balance.set_targets(targets)
        packed = pack(data)
        if packed is not None:
            packed.documents = with_padding(packed.documents, data["real_tokens"].tolist())
            enter_stage(model)
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


def by_autograd(
    documents: bool = False,
    masked: bool = False,
    padded: bool = False,
    replicas: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """One step by plain autograd: every document is a batch of its own, its mask S x S. The balance
    loss is that of each microbatch, or of the microbatches that as many replicas run at a time.

    Returns:
        loss as `train` reports it, importance [L, H] of all tokens, and gradients of the first
        step.
    """
    prefix = options.get("prefix_lm_tokens", 0)
    coeff = options.pop("head_balance_coeff")
    config = tiny_gpt.model_config(head_balance_coeff=0.0, **options)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = tiny_gpt.skew_sinks([MegasinkModelBuilder(config).build_model(groups)])
    gates: dict[int, list[Tensor]] = {}
    text = 0  # tokens of a document that are not padding

    def forward(
        self: CoreAttention, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        bias = None if self.relative_bias is None else self.relative_bias(len(key), key.device)
        out, _, gate = reference_attention(
            *(x.permute(1, 2, 0, 3) for x in (query, key, value)),
            variant=config.transformer.attention_variant,
            sink_H=self.softmax_offset,
            prefix=prefix,
            distance_bias_HS=bias,
        )
        gate_HT = gate.transpose(0, 1).flatten(1)
        gates.setdefault(self.layer_number, []).append(gate_HT[:, :text])
        return out.permute(2, 0, 1, 3).flatten(2)

    for module in model.modules():
        if isinstance(module, CoreAttention):
            module.forward = MethodType(forward, module)
    losses, counts, gates_of_microbatches = [], [], []
    for index in range(tiny_gpt.MICROBATCHES):
        data = batch(0, index, documents, masked, padded)
        data["loss_mask"] = without_prefix(data["loss_mask"], prefix)
        loss = torch.zeros(())
        for sample in range(tiny_gpt.MICROBATCH):
            real = int(data["real_tokens"][sample])
            for start, stop in pairwise([0, *ENDS[sample]] if documents else [0, 32]):
                tokens, labels, mask = (
                    data[key][sample : sample + 1, start:stop]
                    for key in ("tokens", "labels", "loss_mask")
                )
                text = min(max(real - start, 0), stop - start)
                position = torch.arange(stop - start)[None]
                loss = loss + (model(tokens, position, None, labels=labels) * mask).sum()
        losses.append(loss)
        counts.append(data["loss_mask"].sum())
        gates_of_microbatches.append([torch.cat(gates[i], 1) for i in sorted(gates)])
        gates.clear()
    count_M = torch.stack(counts)
    # Megatron's mean: over the targets of the batch, or over the means of the microbatches.
    weight_M = torch.full_like(count_M, 1 / len(count_M))
    if config.transformer.calculate_per_token_loss:
        weight_M = count_M / count_M.sum()
    total = (weight_M * torch.stack(losses) / count_M).sum()
    for first in range(0, tiny_gpt.MICROBATCHES, replicas):
        together = gates_of_microbatches[first : first + replicas]
        importance_LH = importance_of(together)
        every_head = [list(range(tiny_gpt.HEADS))] * len(importance_LH)
        weight = weight_M[first : first + replicas].sum()
        total = total + weight * oracle.balance_loss(importance_LH, coeff, every_head)
    total.backward()
    return {
        "loss": [[torch.stack(losses).sum().item(), count_M.sum().item()]],
        "importance_LH": importance_of(gates_of_microbatches).detach(),
        "gradients": tiny_gpt.shards([model], "grad"),
    }


def importance_of(gates_of_microbatches: list[list[Tensor]]) -> Tensor:
    """The mean gate [L, H] over all tokens, from the gates [H, T] of each layer."""
    layers = zip(*gates_of_microbatches, strict=True)
    return torch.stack([torch.cat(gates_HT, 1).mean(1) for gates_HT in layers])
