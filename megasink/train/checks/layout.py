"""Divisibility checks: model over ranks, layers over stages, batch over replicas.

Megatron asserts each of these (training/arguments.py:validate_args and
core/transformer/transformer_config.py), but one at a time, or only in the first forward.
"""

from argparse import Namespace

_PARALLEL = ("tensor_model", "pipeline_model", "context")


def problems(args: Namespace) -> list[str]:
    """Return one message per problem."""
    sizes = [getattr(args, f"{kind}_parallel_size") for kind in _PARALLEL]
    if any(size < 1 for size in sizes):
        return _groups(args)  # reported elsewhere
    return [*_groups(args), *_ranks(args), *_stages(args), *_overlap(args)]


def _groups(args: Namespace) -> list[str]:
    heads, groups = args.num_attention_heads, args.num_query_groups
    if not args.group_query_attention:
        if groups in (None, 1):
            return []
        return [f"--num-query-groups {groups} is read with --group-query-attention alone: add it"]
    if not heads or not groups or groups < 1:
        return []
    if heads % groups:
        return [f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}"]
    tensor = args.tensor_model_parallel_size
    if tensor > 0 and groups % tensor and tensor % groups:
        return [
            f"--num-query-groups {groups} is neither a multiple nor a divisor of "
            f"--tensor-model-parallel-size {tensor}"
        ]
    return []


def _ranks(args: Namespace) -> list[str]:
    size = 1
    for kind in _PARALLEL:
        size *= getattr(args, f"{kind}_parallel_size")
    text = " * ".join(
        f"--{kind.replace('_', '-')}-parallel-size {getattr(args, f'{kind}_parallel_size')}"
        for kind in _PARALLEL
        if getattr(args, f"{kind}_parallel_size") > 1
    )
    if args.world_size % size:
        return [
            f"{args.world_size} ranks are not divisible by {text}: start a multiple of {size} "
            "(megasink train --ranks, torchrun --nproc-per-node)"
        ]
    replicas = args.world_size // size
    found = []
    experts = args.expert_model_parallel_size
    if experts > 1 and not args.num_experts:
        found.append(f"--expert-model-parallel-size {experts} without --num-experts: drop it")
    if args.step_batch_size_schedule is not None:
        return found
    for prefix, flag in (("", "--"), ("eval_", "--eval-")):
        micro = getattr(args, f"{prefix}micro_batch_size") or args.micro_batch_size
        whole = getattr(args, f"{prefix}global_batch_size")
        if micro and whole and micro > 0 and whole > 0 and whole % (micro * replicas):
            found.append(
                f"{flag}global-batch-size {whole} is not divisible by {flag}micro-batch-size "
                f"{micro} * {replicas} data-parallel ranks"
            )
    return found


def _stages(args: Namespace) -> list[str]:
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    virtual = {
        "--num-layers-per-virtual-pipeline-stage": args.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": args.num_virtual_stages_per_pipeline_rank,
        "--pipeline-model-parallel-layout": args.pipeline_model_parallel_layout,
    }
    given = [flag for flag, value in virtual.items() if value is not None]
    if len(given) > 1:
        return [f"{' and '.join(given)}: choose one"]
    uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    if not layers or uneven or args.pipeline_model_parallel_layout is not None:
        return []
    counted = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    if (layers + counted) % stages:
        also = f" and {counted} for embedding and loss" if counted else ""
        return [
            f"--num-layers {layers}{also} is not divisible by --pipeline-model-parallel-size "
            f"{stages}"
        ]
    if not given:
        return []
    found = []
    each, per_stage = args.num_layers_per_virtual_pipeline_stage, (layers + counted) // stages
    if each is not None and (each < 1 or per_stage % each):
        found.append(
            f"--num-layers-per-virtual-pipeline-stage {each} does not divide the {per_stage} "
            "layers of a stage"
        )
    least = 2 if args.overlap_p2p_comm else 3
    interleaved = each is None or each < per_stage
    if stages < least and interleaved and args.num_virtual_stages_per_pipeline_rank != 1:
        found.append(
            f"{given[0]} needs --pipeline-model-parallel-size {least} or more, not {stages}"
        )
    return found


def _overlap(args: Namespace) -> list[str]:
    wrong = {
        "--overlap-param-gather needs --use-distributed-optimizer: add it": (
            args.overlap_param_gather and not args.use_distributed_optimizer
        ),
        "--overlap-param-gather needs --overlap-grad-reduce: add it": (
            args.overlap_param_gather and not args.overlap_grad_reduce
        ),
        "--tp-comm-overlap needs --sequence-parallel and tensor-parallel ranks": (
            args.tp_comm_overlap
            and (not args.sequence_parallel or args.tensor_model_parallel_size == 1)
        ),
        "--optimizer-cpu-offload needs --use-precision-aware-optimizer: add it": (
            args.optimizer_cpu_offload and not args.use_precision_aware_optimizer
        ),
        "--load-main-params-from-ckpt needs --no-load-optim: add it": (
            args.load_main_params_from_ckpt and not args.no_load_optim
        ),
    }
    return [text for text, is_so in wrong.items() if is_so]
