"""Data for the ranks of a plan: token 0, and documents of equal length.

Shapes: B microbatch, S sequence.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from torch import Tensor

_DOCUMENTS = 4
"""Documents of each sample under --dataloader-inter-document-masking."""


def batches(args: Namespace) -> Iterator[dict[str, Tensor]]:
    """Yield the same microbatch without end, as Megatron's data loader collates it.

    The keys, shapes and dtypes are those of GPTDataset: nothing in a plan depends on the values.
    """
    shape_BS = (args.micro_batch_size, args.seq_length)
    batch: dict[str, Tensor] = {
        "tokens": torch.zeros(shape_BS, dtype=torch.int64),
        "labels": torch.zeros(shape_BS, dtype=torch.int64),
        "loss_mask": torch.ones(shape_BS),
        "position_ids": torch.arange(args.seq_length).expand(shape_BS).contiguous(),
    }
    if args.dataloader_inter_document_masking:
        samples, length = shape_BS
        ends = torch.full((samples, length + 1), length, dtype=torch.int32)
        documents = min(_DOCUMENTS, length)
        ends[:, : documents + 1] = torch.linspace(0, length, documents + 1).to(torch.int32)
        batch["cu_seqlens"] = ends
        batch["max_seqlen"] = ends.diff(dim=1).max(dim=1).values
    batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    while True:
        yield dict(batch)


def iterators(args: Namespace) -> Any:
    """Return (training, validation, test) iterators; the last two are not used."""
    args.do_train, args.do_valid, args.do_test = True, False, False
    return RerunDataIterator(batches(args)), None, None
