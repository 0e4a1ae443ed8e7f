"""Data and routing of a plan: token 0, documents of equal length, equal tokens for each expert.

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


def share_tokens_equally() -> None:
    """Let the router send equally many tokens to each expert, for the rest of the process.

    A hollow GPU computes no routing: the counts by which the host sizes the exchange of the
    alltoall dispatcher read as 0 there, and nothing would be exchanged.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    inner = MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize

    def copied(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        tokens_per_expert = inner(self, point, tokens_per_expert)
        if self.drop_and_pad or point != self.cuda_dtoh_point:
            return tokens_per_expert  # with padding the host knows the sizes
        self.num_out_tokens = self.routing_map.shape[0] * self.config.moe_router_topk
        of_expert = self.num_out_tokens // self.num_experts  # from each rank
        ranks, local = self.ep_size * self.tp_size, self.num_local_experts
        if ranks > 1:
            self.input_splits[:] = self.output_splits[:] = of_expert * local
            self.output_splits_tp[:] = of_expert * local * self.ep_size
        if local > 1:
            self.num_global_tokens_per_local_expert[:] = of_expert
        tokens_per_expert[:] = of_expert * ranks
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = copied
