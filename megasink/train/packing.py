"""Packed documents from the data loader to the layers (--dataloader-inter-document-masking).

As Megatron's own pretrain_gpt does it: the samples of a microbatch become one row of documents,
and every pipeline stage gets their boundaries. Between stages the schedules expect [S, B, d].

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
    """Make one row of the samples of a microbatch, in place; None where it is not packed.

    Args:
        batch: with ``cu_seqlens`` [B, S + 1] int32, each row filled up with S at its end; or None.

    Returns:
        what Megatron's layers take; the boundaries are on the host with it, so that a microbatch
        waits for the device once.
    """
    if batch.get("cu_seqlens") is None:
        return None
    rows = batch["cu_seqlens"].tolist()
    tokens_of_sample = rows[0][-1]
    bounds = [0]
    for index, row in enumerate(rows):
        ends = sorted({end for end in row if end > 0})
        bounds += [index * tokens_of_sample + end for end in ends]
    for key in _PER_TOKEN:
        if batch.get(key) is not None:
            batch[key] = batch[key].reshape(1, -1)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32).to(batch["cu_seqlens"].device)
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
    """Show a stage what it received, [S, B, d], as the [T, 1, d] that was sent."""
    decoder = get_attr_wrapped_model(model, "decoder")
    if decoder.input_tensor is not None:
        received = decoder.input_tensor
        decoder.set_input_tensor(received.view(-1, 1, received.shape[-1]))


def leave_stage(output: Tensor, samples: int) -> Tensor:
    """[T, 1, d] as the [S, B, d] that the next stage receives, byte for byte.

    Args:
        samples: B.
    """
    # The schedules free the memory of what they have sent, and refuse to of a view.
    result: Tensor = make_viewless_tensor(
        output.view(-1, samples, output.shape[-1]), requires_grad=True, keep_graph=True
    )
    return result
