"""Checks for options that need a missing device, or fused kernels that are not installed."""

from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module

from megasink import cpu
from megasink.options.megatron_flags import refused
from megasink.upstream import fused_kernels

_ABSENT = "needs CUDA, but no CUDA device is present"
# Those that attention/kernels and attention/gate_kernels register for CUDA; they import torch.
CUDA_KERNELS = {"flash-attn-4", "flash-attn-3", "flash-attn-2", "flash-cuda"}
CUDA_KERNELS |= {"transformer-engine", "cudnn", "triton"}


def without_cuda(args: Namespace) -> bool:
    """Return whether ranks of this machine run on the CPU platform."""
    return cpu.is_active() or args.device == "cpu" or not cpu.cuda_present()


def problems(args: Namespace) -> Iterator[str]:
    """Yield one message per problem. Imports torch only where a CUDA device may be."""
    if without_cuda(args):
        if args.device == "cuda":
            yield f"--device cuda {_ABSENT}: use cpu"
        if needs_cuda(args.attention_kernel):
            yield f"--attention-kernel {args.attention_kernel} {_ABSENT}: use auto"
        if args.distributed_backend != "gloo":
            yield (
                f"--distributed-backend {args.distributed_backend} {_ABSENT}: drop the flag "
                "(gloo is used), or run on a machine with GPUs"
            )
        if args.num_experts and args.moe_token_dispatcher_type == "flex":
            yield f"--moe-token-dispatcher-type flex {_ABSENT}: use allgather or alltoall"
        tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        expert = args.expert_model_parallel_size
        unequal = args.num_experts and args.moe_token_dispatcher_type == "alltoall"
        if unequal and min(tensor, expert) > 1:
            yield (
                f"--moe-token-dispatcher-type alltoall with {expert} expert- x {tensor} "
                "tensor-parallel ranks: gloo cannot gather tensors of unequal sizes: use "
                "allgather, or --expert-tensor-parallel-size 1"
            )
        for flag, value, _ in refused(args, "without TransformerEngine"):
            flag, cure = (
                (flag, "drop the flag") if value is True else (f"{flag} {value}", "use local")
            )
            yield f"{flag} {_ABSENT}: {cure}"
        for flag, _, why in refused(args, "without CUDA"):
            yield f"{flag} {why or _ABSENT}: drop the flag"
        return
    yield from fused_kernels.problems(args)
    yield from _unsupported_fp8(args)


# TransformerEngine's answer to whether the device runs a recipe, by --fp8-recipe.
_RECIPES = {"delayed": "fp8", "tensorwise": "fp8", "mxfp8": "mxfp8"}
_RECIPES |= {"blockwise": "fp8_block_scaling"}


def _unsupported_fp8(args: Namespace) -> Iterator[str]:
    """Its layers would raise in the first step."""
    kind = _RECIPES.get(args.fp8_recipe) if args.fp8 is not None else None
    if kind is None or fused_kernels.TRANSFORMER_ENGINE.missing() is not None:
        return
    engine = import_module(fused_kernels.TRANSFORMER_ENGINE.module)
    supported, reason = getattr(engine, f"is_{kind}_available")(return_reason=True)
    if not supported:
        yield f"--fp8-format with --fp8-recipe {args.fp8_recipe}: {reason} Use only --bf16"


def needs_cuda(kernel: str) -> bool:
    """Return whether a kernel of --attention-kernel, or its gate kernels, needs CUDA."""
    return not CUDA_KERNELS.isdisjoint(kernel.split("+"))
