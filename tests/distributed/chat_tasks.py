"""Tasks: packed conversations through the trainer's forward step, and each by itself."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training import get_args
from torch import Tensor

from megasink.megatron.model_of_arguments import model_config
from megasink.training import forward
from megasink.training.dataset import datasets_provider
from tests.distributed import data_tasks, tiny_gpt


def alone(argv: Sequence[str]) -> dict[str, Any]:
    """Loss and gradients of the first global batch, of which each conversation is a microbatch.

    Nothing is packed: a conversation begins its sample, and what follows is padding, which it does
    not see.
    """
    data_tasks.start(argv)
    args = get_args()
    samples = [next_sample for _, next_sample in zip(range(_samples()), _train(), strict=False)]
    apart = list(_apart(samples))
    args.dataloader_inter_document_masking = False
    args.micro_batch_size = 1
    config = model_config(args)
    config.finalize()
    models = tiny_gpt.build(config)
    optimizer, _ = tiny_gpt.optimizer_of(config, models, False)
    config.transformer.grad_scale_func = optimizer.scale_loss
    reports = get_forward_backward_func()(
        forward_step_func=forward.forward_step,
        data_iterator=[iter(apart)],
        model=models,
        num_microbatches=len(apart),
        seq_length=args.seq_length,
        micro_batch_size=1,
        forward_only=False,
    )
    return {
        "loss": [sum(r[forward.LM_LOSS] for r in reports).tolist()],
        "gradients": tiny_gpt.shards(models, "main_grad"),
        "conversations": len(apart),
    }


def samples(argv: Sequence[str], wanted: int) -> list[dict[str, Tensor]]:
    """The first samples of a training set of so many."""
    data_tasks.start(argv)
    train, *_ = datasets_provider([wanted, 0, 0])
    return [train[i] for i in range(wanted)]


def _samples() -> int:
    return int(get_num_microbatches() * get_args().micro_batch_size)


def _train() -> Iterator[dict[str, Tensor]]:
    train, *_ = datasets_provider([64, 0, 0])
    return (train[i] for i in range(len(train)))


def _apart(samples: list[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    for sample in samples:
        bounds = sorted({int(end) for end in sample["cu_seqlens"] if end <= sample["real_tokens"]})
        for start, stop in pairwise(bounds):
            size = len(sample["tokens"])
            row = {"position_ids": torch.arange(size)[None]}
            for key in ("tokens", "labels", "loss_mask"):
                part = sample[key][start:stop]
                row[key] = torch.nn.functional.pad(part, (0, size - len(part)))[None]
            yield row
