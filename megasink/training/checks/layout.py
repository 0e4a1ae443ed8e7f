"""Divisibility checks: model over ranks, layers over stages, batch over replicas.

Megatron asserts each of these (training/arguments.py:validate_args and
core/transformer/transformer_config.py), but one at a time, or only in the first forward. They are
met most; what else it asserts, it says itself (training/arguments.py:refusals_of_megatron).
"""

import math
from argparse import Namespace
from collections.abc import Iterator

_PARALLEL = ("tensor-model", "pipeline-model", "context")


def problems(args: Namespace) -> Iterator[str]:
    yield from _groups(args)
    names = (f"{kind}-parallel-size" for kind in _PARALLEL)
    sizes = {f"--{name}": getattr(args, name.replace("-", "_")) for name in names}
    if min(sizes.values()) < 1:
        return  # reported elsewhere
    yield from _ranks(args, sizes)
    yield from _stages(args)


def _groups(args: Namespace) -> Iterator[str]:
    heads, groups = args.num_attention_heads, args.num_query_groups
    tensor = args.tensor_model_parallel_size
    if not args.group_query_attention:
        if groups not in (None, 1):
            yield f"--num-query-groups {groups} needs --group-query-attention: add it"
    elif not heads or not groups or groups < 1:
        return
    elif heads % groups:
        yield f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}"
    elif tensor > 0 and groups % tensor and tensor % groups:
        yield (
            f"--num-query-groups {groups} is neither a multiple nor a divisor of "
            f"--tensor-model-parallel-size {tensor}"
        )


def _ranks(args: Namespace, sizes: dict[str, int]) -> Iterator[str]:
    size = math.prod(sizes.values())
    if args.world_size % size:
        text = " * ".join(f"{flag} {value}" for flag, value in sizes.items() if value > 1)
        yield (
            f"{args.world_size} ranks are not divisible by {text}: start a multiple of {size} "
            "(megasink train --ranks, torchrun --nproc-per-node)"
        )
        return
    if args.step_batch_size_schedule is not None:
        return
    replicas = args.world_size // size
    for prefix, flag in (("", "--"), ("eval_", "--eval-")):
        micro = getattr(args, f"{prefix}micro_batch_size") or args.micro_batch_size
        whole = getattr(args, f"{prefix}global_batch_size")
        if micro and whole and micro > 0 and whole > 0 and whole % (micro * replicas):
            yield (
                f"{flag}global-batch-size {whole} is not divisible by {flag}micro-batch-size "
                f"{micro} * {replicas} data-parallel ranks"
            )


def _stages(args: Namespace) -> Iterator[str]:
    if args.hybrid_layer_pattern is not None:
        return  # checks/hybrid.py
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    if not layers or uneven or args.pipeline_model_parallel_layout is not None:
        return
    counted = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    if (layers + counted) % stages:
        also = f" and {counted} for embedding and loss" if counted else ""
        yield (
            f"--num-layers {layers}{also} is not divisible by --pipeline-model-parallel-size "
            f"{stages}"
        )
