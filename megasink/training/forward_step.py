"""The forward step: model, loss, and validation's sums for bits per byte.

As in Megatron's pretrain_gpt, the samples of a microbatch of packed documents become one row, which
context-parallel ranks split. Between stages the schedules expect [S, B, d].

Shapes: B microbatch, S sequence, V vocabulary, d hidden size.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_model_config, make_viewless_tensor
from megatron.training import get_args, get_timers
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from torch import Tensor

from megasink.balance.step import Phase
from megasink.megatron.context_parallel import own_chunks
from megasink.megatron.microbatch_documents import PackedRow, row_of_documents
from megasink.training.build_datasets import get_batch, token_byte_table
from megasink.training.metric_records import is_observed

_PER_TOKEN = ("tokens", "labels", "loss_mask", "position_ids", "text_targets")


def pack(batch: dict[str, Any]) -> PackedRow | None:
    """Merge the samples of a microbatch into one row, and keep this rank's tokens, in place."""
    # Returns the documents with their boundaries on the host: only ranks that did not read them
    # synchronize with the device. None if the batch is not packed.
    if batch.get("cu_seqlens") is None:
        return None
    on_host = batch.get("host_cu_seqlens")
    rows = (batch["cu_seqlens"] if on_host is None else on_host).tolist()
    length = rows[0][-1]
    bounds = [0]
    for index, row in enumerate(rows):
        bounds += [index * length + end for end in sorted({end for end in row if end > 0})]
    group = parallel_state.get_context_parallel_group()
    ranks, rank = group.size(), group.rank()
    for key in _PER_TOKEN:
        if batch.get(key) is not None:
            batch[key] = own_chunks(batch[key].reshape(1, -1), ranks, rank, dim=1)
    device = batch["cu_seqlens"].device
    pinned = torch.tensor(bounds, dtype=torch.int32, pin_memory=device.type == "cuda")
    cu_seqlens = pinned.to(device, non_blocking=True)
    return PackedRow(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        # Length of the table of rotary angles, the same for every microbatch.
        max_seqlen_q=length,
        max_seqlen_kv=length,
        documents=row_of_documents(bounds, device=device, ranks=ranks, rank=rank),
    )


def enter_stage(model: Any) -> None:
    """Reshape a stage's input from [S / cp, B, d] back to [T, 1, d]."""
    decoder = get_attr_wrapped_model(model, "decoder")
    if decoder.input_tensor is not None:
        received = decoder.input_tensor
        decoder.set_input_tensor(received.view(-1, 1, received.shape[-1]))


def leave_stage(output: Tensor, samples: int) -> Tensor:
    """Reshape [T, 1, d] to the [S / cp, B, d] that the next stage expects, with identical bytes."""
    # The schedules free the memory of sent tensors, and refuse views.
    result: Tensor = make_viewless_tensor(
        output.view(-1, samples, output.shape[-1]), requires_grad=True, keep_graph=True
    )
    return result


LM_LOSS = "lm loss"
BITS_PER_BYTE = "bits per byte"

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


def forward_step(
    data_iterator: Iterator[Any] | None, model: HybridModel
) -> tuple[Tensor, LossFunction]:
    """Run one microbatch through this pipeline stage, for Megatron's ``pretrain``."""
    timers, args = get_timers(), get_args()
    statistics = get_model_config(model).statistics
    if model.training:
        step = args.curr_iteration
        if (statistics.phase, statistics.number) != (Phase.RUNNING, step):  # the first microbatch
            statistics.begin(step, observe=is_observed(args, step + 1))
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    batch = get_batch(data_iterator, vp_stage)
    packed = pack(batch)
    timers("batch-generator").stop()
    if batch["targets"] is not None:
        statistics.set_targets(batch["targets"])
    if packed is not None:
        if model.training and not vp_stage:  # once per microbatch
            # Megatron's throughput then counts what attention actually computes.
            update_seqlen_stats_from_cu_seqlens(packed.cu_seqlens_q)
        enter_stage(model)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=packed,
        # Read by the losses of multi-token prediction alone.
        loss_mask=batch["loss_mask"],
    )
    if packed is not None and not get_attr_wrapped_model(model, "post_process"):
        output = leave_stage(output, args.micro_batch_size)
    output = statistics.keep(output)
    of_batch = (batch["labels"], batch["loss_mask"], batch["targets"], batch["text_targets"])
    return output, functools.partial(loss_func, *of_batch, batch["before_texts"], model.training)


def loss_func(
    labels: Tensor,
    loss_mask: Tensor,
    targets: Tensor,
    text_targets: Tensor | None,
    before_texts: Tensor | None,
    training: bool,
    token_losses: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (sum of nats, number of targets as int32, {name: [numerator, denominator]})."""
    # Megatron sums the pairs over microbatches and ranks. `targets` and `before_texts` are of all
    # context-parallel ranks, the other tensors [B, S] of this one.
    args, mask = get_args(), loss_mask.view(-1).float()
    losses = token_losses.view(-1).float()
    loss = torch.sum(losses * mask)
    count = mask.sum().detach().to(torch.int)
    _refuse_nan(loss)
    report = {LM_LOSS: torch.stack([loss.detach(), count.float()])}
    if not training and (table := _byte_table()) is not None:
        size = table[labels.view(-1)].float() * mask
        if text_targets is not None:
            size = size * text_targets.reshape(-1)
        # Special and replaced tokens have no bytes: neither nats nor bytes count (P0.18).
        nats = (losses.detach() * mask * (size > 0)).sum()
        total = size.sum()
        if before_texts is not None:
            total = total - before_texts / args.context_parallel_size
        report[BITS_PER_BYTE] = torch.stack([nats / math.log(2), total])
    if args.context_parallel_size > 1 and not args.calculate_per_token_loss:
        # Megatron divides by the count and averages over context-parallel ranks. With masked
        # targets, counts differ between ranks: the mean of their means is not the mean.
        return loss * args.context_parallel_size, targets.to(torch.int), report
    return loss, count, report


@functools.cache
def _byte_table() -> Tensor | None:
    return token_byte_table()


def _refuse_nan(loss: Tensor) -> None:
    """Run Megatron's NaN check before the loss is reduced, so that the error names the rank."""
    if not get_args().check_for_nan_in_loss_and_grad:
        return
    get_rerun_state_machine().validate_result(
        result=loss,
        rejection_func=lambda result: ~torch.isfinite(result),
        message="found NaN or Inf in local forward loss calculation",
        tolerance=0.0,
        fatal=True,
    )
