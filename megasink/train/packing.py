"""Pass packed documents from the data loader to the layers (--dataloader-inter-document-masking).

As in Megatron's pretrain_gpt, the samples of a microbatch become one row of documents, and every
pipeline stage receives the boundaries. Between stages the schedules expect [S, B, d].

Shapes: B microbatch, S sequence, T = B * S, d hidden size.
"""

from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model, make_viewless_tensor
from torch import Tensor

from megasink.layers.documents import with_documents

_PER_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")


def pack(batch: dict[str, Any]) -> PackedSeqParams | None:
    """Merge the samples of a microbatch into one row, in place.

    Args:
        batch: with ``cu_seqlens`` [B, S + 1] int32, each row padded with S at the end, or None; and
            ``host_cu_seqlens``, the same on the host, or None.

    Returns:
        Megatron's packing parameters, with the boundaries also on the host, so that a microbatch
        synchronizes with the device at most once: on ranks that did not read them themselves.
        None if the batch is not packed.
    """
    if batch.get("cu_seqlens") is None:
        return None
    on_host = batch.get("host_cu_seqlens")
    rows = (batch["cu_seqlens"] if on_host is None else on_host).tolist()
    tokens_of_sample = rows[0][-1]
    bounds = [0]
    for index, row in enumerate(rows):
        ends = sorted({end for end in row if end > 0})
        bounds += [index * tokens_of_sample + end for end in ends]
    for key in _PER_TOKEN:
        if batch.get(key) is not None:
            batch[key] = batch[key].reshape(1, -1)
    device = batch["cu_seqlens"].device
    pinned = torch.tensor(bounds, dtype=torch.int32, pin_memory=device.type == "cuda")
    cu_seqlens = pinned.to(device, non_blocking=True)
    longest = max(stop - start for start, stop in pairwise(bounds))
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return with_documents(params, bounds)


def enter_stage(model: Any) -> None:
    """Reshape a stage's input from [S, B, d] back to [T, 1, d]."""
    decoder = get_attr_wrapped_model(model, "decoder")
    if decoder.input_tensor is not None:
        received = decoder.input_tensor
        decoder.set_input_tensor(received.view(-1, 1, received.shape[-1]))


def leave_stage(output: Tensor, samples: int) -> Tensor:
    """Reshape [T, 1, d] to the [S, B, d] that the next stage expects, with identical bytes."""
    # The schedules free the memory of sent tensors, and refuse views.
    result: Tensor = make_viewless_tensor(
        output.view(-1, samples, output.shape[-1]), requires_grad=True, keep_graph=True
    )
    return result
