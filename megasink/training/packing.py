"""Pass packed documents from the data loader to the layers (--dataloader-inter-document-masking).

As in Megatron's pretrain_gpt, the samples of a microbatch become one row of documents, and every
pipeline stage receives the boundaries. Context-parallel ranks split the row, not each document.
Between stages the schedules expect [S, B, d].

Shapes: B microbatch, S sequence, T = B * S / cp tokens of this rank, d hidden size.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, make_viewless_tensor
from torch import Tensor

from megasink.megatron.context_parallel import own_chunks
from megasink.megatron.documents import PackedRow, row_of_documents

_PER_TOKEN = ("tokens", "labels", "loss_mask", "position_ids", "text_targets")


def pack(batch: dict[str, Any]) -> PackedRow | None:
    """Merge the samples of a microbatch into one row and keep this rank's tokens of it, in place.

    Args:
        batch: Of the whole microbatch, with ``cu_seqlens`` [B, S + 1] int32, each row padded with S
            at the end, or None; and ``host_cu_seqlens``, the same on the host, or None.

    Returns:
        The documents of the row, with the boundaries on the host, so that a microbatch synchronizes
        with the device at most once: on ranks that did not read them themselves. None if the batch
        is not packed.
    """
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
