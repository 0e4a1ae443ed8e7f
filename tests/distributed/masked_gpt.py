"""Tasks for the workers: the tiny GPT over packed documents, or as a prefix language model.

Shapes: B microbatch, S sequence, T = B * S, H query heads.
"""

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
from megasink.layers.builder import MegasinkGPTBuilder
from megasink.layers.core_attention import CoreAttention
from megasink.train.dataset import without_prefix
from megasink.train.packing import enter_stage, leave_stage, pack
from tests.distributed import oracle, tiny_gpt

# Of each sample: the ends of its documents. One of a single token, two of one length.
ENDS = ([5, 6, 18, 32], [13, 25, 32])


def batch(step: int, index: int, documents: bool) -> dict[str, Any]:
    """A microbatch as the data loader gives it."""
    data: dict[str, Any] = tiny_gpt.batch(step, index)
    if documents:
        length = tiny_gpt.SEQUENCE
        rows = [[0, *ends] + [length] * (length - len(ends)) for ends in ENDS]
        data["cu_seqlens"] = torch.tensor(rows, dtype=torch.int32)
        data["position_ids"] = data["position_ids"].clone()
        for row, ends in zip(data["position_ids"], ENDS, strict=True):
            for start, stop in pairwise([0, *ends]):
                row[start:stop] = torch.arange(stop - start)
    return data


def train(documents: bool = False, **options: Any) -> dict[str, Any]:
    """What :func:`tiny_gpt.train` reports; the forward step is that of megasink.train.forward."""
    prefix = options.get("prefix_lm_tokens", 0)

    def forward_step(iterator: Iterator[tuple[int, int]], model: Any) -> tuple[Tensor, Any]:
        data = batch(*next(iterator), documents)
        data["loss_mask"] = without_prefix(data["loss_mask"], prefix)
        balance = get_model_config(model).statistics.balance
        balance.set_targets(data["loss_mask"].sum())
        packed = pack(data)
        if packed is not None:
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
        mask = data["loss_mask"]

        def loss_function(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            loss = (losses.float() * mask).sum()
            return loss, mask.sum().to(torch.int), torch.stack([loss.detach(), mask.sum()])

        return balance.keep_targets(output), loss_function

    def microbatches(step: int, masked: bool) -> Iterator[tuple[int, int]]:
        state = tiny_gpt.parallel_state
        size, rank = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
        yield from ((step, index) for index in range(rank, tiny_gpt.MICROBATCHES, size))

    with (
        mock.patch.object(tiny_gpt, "forward_step", forward_step),
        mock.patch.object(tiny_gpt, "microbatches", microbatches),
    ):
        return tiny_gpt.train(**options)


def by_autograd(documents: bool = False, **options: Any) -> dict[str, Any]:
    """One step by plain autograd: every document is a batch of its own, its mask S x S. The balance
    loss is that of each microbatch.

    Returns:
        loss as `train` reports it, importance [L, H] and gradients of the first step.
    """
    prefix = options.get("prefix_lm_tokens", 0)
    coeff = options.pop("head_balance_coeff")
    config = tiny_gpt.model_config(head_balance_coeff=0.0, **options)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = tiny_gpt.skew_sinks([MegasinkGPTBuilder(config).build_model(groups)])
    gates: dict[int, list[Tensor]] = {}

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
        gates.setdefault(self.layer_number, []).append(gate.transpose(0, 1).flatten(1))
        return out.permute(2, 0, 1, 3).flatten(2)

    for module in model.modules():
        if isinstance(module, CoreAttention):
            module.forward = MethodType(forward, module)
    total, report, rows = torch.zeros(()), torch.zeros(2), []
    for index in range(tiny_gpt.MICROBATCHES):
        data = tiny_gpt.batch(0, index)
        losses, count = [], 0
        for sample in range(tiny_gpt.MICROBATCH):
            for start, stop in pairwise([0, *ENDS[sample]] if documents else [0, 32]):
                part = {k: v[sample : sample + 1, start:stop] for k, v in data.items()}
                position = torch.arange(stop - start)[None]
                loss = model(part["tokens"], position, None, labels=part["labels"])
                losses.append(loss[:, max(prefix - 1, 0) :].sum())
                count += stop - start - max(prefix - 1, 0)
        importance_LH = torch.stack([torch.cat(gates[i], 1).mean(1) for i in sorted(gates)])
        gates.clear()
        loss = torch.stack(losses).sum()
        report += torch.tensor([loss.item(), count])
        every_head = [list(range(tiny_gpt.HEADS))] * len(importance_LH)
        total = total + loss / count + oracle.balance_loss(importance_LH, coeff, every_head)
        rows.append(importance_LH)
    (total / tiny_gpt.MICROBATCHES).backward()
    return {
        "loss": [report.tolist()],
        "importance_LH": torch.stack(rows).mean(0).detach(),
        "gradients": tiny_gpt.shards([model], "grad"),
    }
