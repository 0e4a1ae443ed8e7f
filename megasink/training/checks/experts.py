"""Checks of MoE layers and their recomputation."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.flags import flag_of
from megasink.megatron_flags import refused
from megasink.upstream.versions import have_transformer_engine

# Selective recomputation that frees outputs supports only TransformerEngine
# (megatron/core/tensor_parallel/random.py:693).
_RECOMPUTED_BY_TE = ("layernorm", "moe_act", "mla_up_proj")
_ABSENT = "needs TransformerEngine, which is not installed"


def problems(args: Namespace) -> Iterator[str]:
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
            "--recompute-modules mlp needs --disable-bias-linear: Megatron's recomputation never "
            "finishes if it returns a bias"
        )
