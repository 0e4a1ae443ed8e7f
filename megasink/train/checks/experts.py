"""What a command line gets wrong about MoE layers and what recomputes them."""

from argparse import Namespace

from megasink import platform
from megasink.compat import have_transformer_engine

# Kernels for experts that are TransformerEngine's.
_FUSED = {
    "moe_grouped_gemm": "--moe-grouped-gemm",
    "moe_permute_fusion": "--moe-permute-fusion",
    "moe_router_fusion": "--moe-router-fusion",
}
# Selective recomputation that frees outputs is written for TransformerEngine alone
# (megatron/core/tensor_parallel/random.py:693).
_RECOMPUTED_BY_TE = ("layernorm", "moe_act", "mla_up_proj")


def problems(args: Namespace) -> list[str]:
    """A sentence for each."""
    return [*_experts(args), *_recompute(args)]


def _experts(args: Namespace) -> list[str]:
    found: list[str] = []
    if not args.num_experts:
        return found
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
            f"{flag} needs TransformerEngine, which is not installed: drop the flag"
            for name, flag in _FUSED.items()
            if getattr(args, name)
        ]
    return found


def _recompute(args: Namespace) -> list[str]:
    found = []
    modules = args.recompute_modules or []
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
