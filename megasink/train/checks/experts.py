"""Checks of MoE layers and their recomputation."""

from argparse import Namespace

from megasink import platform
from megasink.flags import flag_of
from megasink.upstream.versions import have_transformer_engine

# TransformerEngine's kernels for experts.
_FUSED = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
# Selective recomputation that frees outputs supports only TransformerEngine
# (megatron/core/tensor_parallel/random.py:693).
_RECOMPUTED_BY_TE = ("layernorm", "moe_act", "mla_up_proj")


def problems(args: Namespace) -> list[str]:
    """Return one message per problem."""
    return [*_experts(args), *_recompute(args)]


def _experts(args: Namespace) -> list[str]:
    found: list[str] = []
    if not args.num_experts:
        return [
            f"{flag_of(name)} without --num-experts: drop it, or give them"
            for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
            if getattr(args, name) is not None
        ]
    tensor, expert = args.tensor_model_parallel_size, args.expert_model_parallel_size
    if args.num_experts % expert:
        found.append(
            f"--num-experts {args.num_experts} is not divisible by "
            f"--expert-model-parallel-size {expert}"
        )
    if args.moe_router_topk > args.num_experts:
        found.append(
            f"--moe-router-topk {args.moe_router_topk} is more than "
            f"--num-experts {args.num_experts}"
        )
    if tensor > 1 and not args.sequence_parallel:
        found.append(
            f"--num-experts with --tensor-model-parallel-size {tensor} needs --sequence-parallel"
        )
    if args.add_bias_linear:
        found.append(
            "--num-experts needs --disable-bias-linear: Megatron adds the biases of experts in "
            "place, which autograd refuses"
        )
    if platform.is_active() and args.moe_token_dispatcher_type == "flex":
        found.append(
            "--moe-token-dispatcher-type flex needs CUDA and no CUDA device is present: "
            "use allgather or alltoall"
        )
    if not have_transformer_engine():
        found += [
            f"{flag_of(name)} needs TransformerEngine, which is not installed: drop the flag"
            for name in _FUSED
            if getattr(args, name)
        ]
    return found


def _recompute(args: Namespace) -> list[str]:
    found = []
    modules = args.recompute_modules or []
    granularity, method, count = (
        "selective" if args.recompute_activations else args.recompute_granularity,
        args.recompute_method,
        args.recompute_num_layers,
    )
    wrong = {
        "--recompute-granularity full needs --recompute-method (uniform or block)": (
            granularity == "full" and method is None
        ),
        "--recompute-granularity full needs --recompute-num-layers": (
            granularity == "full" and count is None
        ),
        "--recompute-method goes with --recompute-granularity full": (
            granularity != "full" and method is not None
        ),
        "--recompute-num-layers goes with --recompute-granularity full": (
            granularity != "full" and count is not None
        ),
        "--distribute-saved-activations needs --recompute-granularity full and tensor-parallel "
        "ranks": (
            args.distribute_saved_activations
            and (granularity != "full" or args.tensor_model_parallel_size == 1)
        ),
        "--distribute-saved-activations with --sequence-parallel: drop one of the two": (
            args.distribute_saved_activations and args.sequence_parallel
        ),
    }
    found += [text for text, is_so in wrong.items() if is_so]
    if not have_transformer_engine():
        found += [
            f"--recompute-modules {name} needs TransformerEngine, which is not installed: "
            "use core_attn, mlp or moe"
            for name in _RECOMPUTED_BY_TE
            if name in modules
        ]
    if "mlp" in modules and args.add_bias_linear:
        found.append(
            "--recompute-modules mlp needs --disable-bias-linear: Megatron's recomputation does "
            "not end where it returns a bias"
        )
    return found
