"""The model over ranks: heads, layers, batches, the sequence, experts; and recomputation.

Megatron asserts each of these (training/parse_arguments.py:validate_args and
core/transformer/transformer_config.py), but one at a time, or only in the first forward. These are
the most frequent; `refusals_of_megatron` (training/parse_arguments.py) converts the others.
"""

import math
from argparse import Namespace
from collections.abc import Iterator

from megasink.config import COMM_TYPES
from megasink.megatron.ring_attention import ring_problems
from megasink.options.dataclass_flags import flag_of
from megasink.options.megatron_flags import refused
from megasink.upstream.versions import have_transformer_engine

_PARALLEL = ("tensor-model", "pipeline-model", "context")
# Selective recomputation that frees outputs supports only TransformerEngine
# (megatron/core/tensor_parallel/random.py:693).
_RECOMPUTED_BY_TE = ("layernorm", "moe_act", "mla_up_proj")
_ABSENT = "needs TransformerEngine, which is not installed"


def problems(args: Namespace) -> Iterator[str]:
    yield from _groups(args)
    yield from _experts_and_recompute(args)
    yield from _context_parallel(args)
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
            yield f"--num-query-groups {groups} needs --group-query-attention: add that flag"
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
    instances, stages = (
        args.num_distributed_optimizer_instances,
        sizes["--pipeline-model-parallel-size"],
    )
    experts = args.expert_model_parallel_size * (
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    )
    replicas = args.world_size // size
    if args.num_experts and args.world_size % (experts * stages):
        yield (
            f"{args.world_size} ranks are not divisible by {experts * stages}, the product of the "
            "expert-, expert-tensor- and pipeline-parallel sizes"
        )
    elif instances > 1 and (
        replicas * args.context_parallel_size % instances
        or args.world_size // (experts * stages) % instances
    ):
        yield (
            f"--num-distributed-optimizer-instances {instances} must divide the number of "
            "data-parallel ranks, that of experts and that of the other layers"
        )
    if args.step_batch_size_schedule is not None:
        return
    for prefix, flag in (("", "--"), ("eval_", "--eval-")):
        micro = getattr(args, f"{prefix}micro_batch_size") or args.micro_batch_size
        batch = getattr(args, f"{prefix}global_batch_size")
        if micro and batch and micro > 0 and batch > 0 and batch % (micro * replicas):
            cure = _fitting(batch, micro, replicas, size)
            yield (
                f"{flag}global-batch-size {batch} is not divisible by {flag}micro-batch-size "
                f"{micro} * {replicas} data-parallel ranks: {cure}"
            )


def _fitting(batch: int, micro: int, replicas: int, size: int) -> str:
    """Return the numbers of ranks that a global batch allows, and the batch that the ranks need."""
    most = {}
    for each in (micro, 1):
        # The most that the batch allows, or the next lower number where only some divide it.
        counts = [n for n in range(1, min(replicas, batch) + 1) if batch % (each * n) == 0]
        if counts:
            words = "at most " * (counts[-1] * each == batch)
            most[each] = f"{words}{counts[-1] * size:,}"
    fitting = ", ".join(f"{count} with {each}" for each, count in most.items())
    fitting = fitting.replace(" with ", " ranks with a micro batch of ", 1)
    needed = math.ceil(batch / replicas) * replicas
    also = " and a micro batch of 1" * (needed % (micro * replicas) > 0)
    return f"use {fitting}; {replicas * size:,} ranks need a global batch of {needed:,}{also}"


def _stages(args: Namespace) -> Iterator[str]:
    if args.hybrid_layer_pattern is not None:
        return  # checks/hybrid.py
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    if not layers or uneven or args.pipeline_model_parallel_layout is not None:
        return
    counted = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    if (layers + counted) % stages:
        also = f" plus {counted} for embedding and loss" if counted else ""
        yield (
            f"--num-layers {layers}{also} is not divisible by --pipeline-model-parallel-size "
            f"{stages}"
        )


def _context_parallel(args: Namespace) -> Iterator[str]:
    size = args.context_parallel_size
    if size == 1:
        return
    if size < 1:
        yield f"--context-parallel-size {size}: use 1 or more"
        return
    if args.seq_length and args.seq_length % (2 * size):
        yield (
            f"--seq-length {args.seq_length} is not divisible by 2 * --context-parallel-size "
            f"{size}: each rank takes two chunks of the sequence"
        )
    yield from _comm_type(args)


def _comm_type(args: Namespace) -> Iterator[str]:
    kinds, layers = args.cp_comm_type, args.num_layers
    for kind in dict.fromkeys(kinds):
        if kind not in COMM_TYPES:
            yield f"--cp-comm-type {kind} is not supported: use {', '.join(COMM_TYPES)}"
    if layers and len(kinds) not in (1, layers):
        yield f"--cp-comm-type has {len(kinds)} values for {layers} layers: use 1 or {layers}"
    if "p2p" in kinds:
        unsupported = [*ring_problems(args)]
        if args.dataloader_inter_document_masking:
            unsupported.append("--dataloader-inter-document-masking")
        for flag in unsupported:
            yield f"--cp-comm-type p2p with {flag}: use --cp-comm-type all_gather"
    if "all_gather" in kinds and args.prefix_lm_tokens:
        yield (
            "--prefix-lm-tokens with --cp-comm-type all_gather: the prefix may extend beyond a "
            "rank's chunks: use --cp-comm-type a2a"
        )
    if "a2a" not in kinds or not (heads := args.num_attention_heads):
        return
    # Heads and key/value groups are divided among the ranks.
    size, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    counts = {"--num-attention-heads": heads}
    if args.group_query_attention:
        # With fewer groups than tensor-parallel ranks, each rank has a copy of one group.
        counts["--num-query-groups"] = max(args.num_query_groups or heads, tensor)
    for flag, count in counts.items():
        if count % (tensor * size):
            yield (
                f"--cp-comm-type a2a: {flag} {count} is not divisible by "
                f"--tensor-model-parallel-size {tensor} * --context-parallel-size {size}: use "
                "--cp-comm-type all_gather"
            )


def _experts_and_recompute(args: Namespace) -> Iterator[str]:
    if args.num_experts:
        yield from _experts(args)
    else:
        for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
            if getattr(args, name) is not None:
                yield f"{flag_of(name)} without --num-experts: drop it, or add --num-experts"
    yield from _recompute(args)


def _experts(args: Namespace) -> Iterator[str]:
    tensor, expert = args.tensor_model_parallel_size, args.expert_model_parallel_size
    flag = f"--num-experts {args.num_experts}"
    if args.num_experts % expert:
        yield f"{flag} is not divisible by --expert-model-parallel-size {expert}"
    if args.moe_router_topk > args.num_experts:
        yield f"--moe-router-topk {args.moe_router_topk} is more than {flag}"
    if tensor > 1 and not args.sequence_parallel:
        yield f"--num-experts with --tensor-model-parallel-size {tensor} needs --sequence-parallel"
    if args.add_bias_linear and args.moe_shared_expert_intermediate_size:
        yield (
            "--moe-shared-expert-intermediate-size needs --disable-bias-linear: Megatron's shared "
            "experts have no biases"
        )
    if args.add_bias_linear and tensor > 1 and args.expert_tensor_parallel_size != 1:
        yield (
            f"{flag} with biases and --tensor-model-parallel-size {tensor}: biases of experts are "
            "not sharded: add --expert-tensor-parallel-size 1, or --disable-bias-linear"
        )
    if args.add_bias_linear and args.swiglu and args.bias_swiglu_fusion:
        yield (
            f"{flag} with --swiglu: Megatron's fused SwiGLU of experts has no biases: add "
            "--disable-bias-linear or --no-bias-swiglu-fusion"
        )
    if not have_transformer_engine():
        for flag, *_ in refused(args, "without TransformerEngine's experts"):
            yield f"{flag} {_ABSENT}: drop the flag"


def _recompute(args: Namespace) -> Iterator[str]:
    modules = args.recompute_modules or []
    full = args.recompute_granularity == "full" and not args.recompute_activations
    for flag, value in (
        ("--recompute-method (uniform or block)", args.recompute_method),
        ("--recompute-num-layers", args.recompute_num_layers),
    ):
        if full and value is None:
            yield f"--recompute-granularity full needs {flag}"
        elif not full and value is not None:
            yield f"{flag.partition(' ')[0]} needs --recompute-granularity full"
    for name in _RECOMPUTED_BY_TE:
        if name in modules and not have_transformer_engine():
            yield f"--recompute-modules {name} {_ABSENT}: use core_attn, mlp or moe"
    if "mlp" in modules and args.add_bias_linear:
        yield (
            "--recompute-modules mlp needs --disable-bias-linear: with a bias Megatron's "
            "recomputation hangs"
        )
