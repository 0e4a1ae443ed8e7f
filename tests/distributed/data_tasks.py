"""Tasks: the trainer's own data path and forward step, from a command line to gradients."""

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training import get_args, get_tokenizer
from megatron.training.datasets.data_samplers import build_pretraining_data_loader
from megatron.training.global_vars import set_global_variables
from megatron.training.training import consume_seqlen_stats_in_iteration

from megasink.megatron.model_of_arguments import model_config
from megasink.training import forward_step, parse_arguments
from megasink.training.build_datasets import datasets_provider, token_byte_table
from tests.distributed import tiny_gpt


def start(argv: Sequence[str]) -> None:
    """Megatron's global variables, as `pretrain` sets them."""
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    os.environ |= {"WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    with contextlib.redirect_stdout(io.StringIO()):
        args, _ = parse_arguments.parse(argv)
        set_global_variables(args)
    args.curr_iteration = 0
    forward_step._byte_table.cache_clear()


def batches(vp_stage: int | None) -> Iterator[Any] | None:
    """What Megatron's data loader gives this rank."""
    train, *_ = datasets_provider([64, 0, 0], vp_stage)
    return None if train is None else iter(build_pretraining_data_loader(train, 0))


def write_numbered(prefix: str, documents: Sequence[int], first: int) -> None:
    """A data set of documents of so many tokens, each token an id of its own."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for length in documents:
        builder.add_document(torch.arange(first, first + length, dtype=torch.int32), [length])
        first += length
    builder.finalize(f"{prefix}.idx")


def orders(argv: Sequence[str], sizes: Sequence[int]) -> list[list[list[int]]]:
    """The tokens of every sample, for a run of so many samples each."""
    start(argv)
    found = [(datasets_provider([size, 0, 0])[0], size) for size in sizes]
    return [[data[i]["tokens"].tolist() for i in range(size)] for data, size in found]


def one_step(argv: Sequence[str]) -> dict[str, Any]:
    """Losses and gradients of the first global batch."""
    start(argv)
    args = get_args()
    config = model_config(args)
    config.finalize()
    models = tiny_gpt.build(config)
    optimizer, _ = tiny_gpt.optimizer_of(config, models, False)
    config.transformer.grad_scale_func = optimizer.scale_loss
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    reports = get_forward_backward_func()(
        forward_step_func=forward_step.forward_step,
        data_iterator=[batches(stage if interleaved else None) for stage in range(len(models))],
        model=models,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    sums = sum(r[forward_step.LM_LOSS] for r in reports) if reports else None
    return {
        "loss": [None if sums is None else sums.tolist()],
        "gradients": tiny_gpt.shards(models, "main_grad"),
        "lengths": consume_seqlen_stats_in_iteration(),
    }


def evaluation(argv: Sequence[str]) -> dict[str, Any]:
    """Sums of an evaluation, and the targets and byte table that they are of."""
    start(argv)
    config = model_config(get_args())
    config.finalize()
    (model,) = tiny_gpt.build(config)
    model.eval()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step.forward_step,
        data_iterator=batches(None),
        model=[model],
        num_microbatches=1,
        seq_length=get_args().seq_length,
        micro_batch_size=get_args().micro_batch_size,
        forward_only=True,
    )
    assert consume_seqlen_stats_in_iteration() == (None, None)  # else of the next training step
    again = batches(None)  # of all ranks together
    if not parallel_state.is_pipeline_last_stage():
        return {"bits": None}
    read, (report,) = next(again) if again else {}, reports
    return {
        "lm loss": report[forward_step.LM_LOSS],
        "bits": report[forward_step.BITS_PER_BYTE],
        "labels": read.get("labels"),
        "tokens": read.get("tokens"),
        "bytes": token_byte_table(),
    }


def samples(argv: Sequence[str], counts: Sequence[int]) -> list[dict[str, Any]]:
    """The training samples of data sets of so many samples, and where each begins in its data."""
    start(argv)
    found = []
    for count in counts:
        train, *_ = datasets_provider([count, 0, 0])
        (data,) = train.datasets if hasattr(train, "datasets") else (train,)
        items = [data[i] for i in range(len(data))]
        begins = [data.sample_index[data.shuffle_index[i]] for i in range(len(data))]
        names = ("tokens", "labels", "loss_mask", "cu_seqlens")
        keys = [name for name in names if name in items[0]]
        found.append({key: torch.stack([item[key] for item in items]) for key in keys})
        found[-1]["begins"] = [(int(data.document_index[d]), int(o)) for d, o in begins]
    return found


def boundaries(argv: Sequence[str]) -> dict[str, Any]:
    """Where the documents of a batch end, and which tokens stand there."""
    start(argv)
    data = next(batches(None))
    last, positions = [], []
    for row, tokens, position in zip(
        data["cu_seqlens"].tolist(), data["tokens"], data["position_ids"], strict=True
    ):
        bounds = sorted(set(row))
        last += [int(tokens[end - 1]) for end in bounds[1:-1]]
        positions += [position[a:b].tolist() == list(range(b - a)) for a, b in pairwise(bounds)]
    assert parallel_state.get_pipeline_model_parallel_world_size() == 1
    return {"last": last, "restart": all(positions), "eod": get_tokenizer().eod}
