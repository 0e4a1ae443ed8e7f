"""Checks for options that need a missing device, or fused kernels that are not installed."""

from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module

from megasink import cpu
from megasink.attention.variants.gate_options import trailing_rows
from megasink.attention.variants.switch_options import switch_rows
from megasink.options.megatron_flags import refused
from megasink.training.ffn_width import with_shape
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
    """Its layers would raise in the first step: of this device, or with these sizes."""
    kind = _RECIPES.get(args.fp8_recipe) if args.fp8 is not None else None
    if kind is None or fused_kernels.TRANSFORMER_ENGINE.missing() is not None:
        return
    engine = import_module(fused_kernels.TRANSFORMER_ENGINE.module)
    supported, reason = getattr(engine, f"is_{kind}_available")(return_reason=True)
    if not supported:
        yield f"--fp8-format with --fp8-recipe {args.fp8_recipe}: {reason} Use only --bf16"
    elif args.hidden_size and args.num_attention_heads:
        import torch

        yield from uneven_sizes(args, torch.cuda.get_device_capability())


def uneven_sizes(args: Namespace, capability: tuple[int, int]) -> Iterator[str]:
    """Check what TransformerEngine asserts of the tensors of its GEMMs."""
    multiple = 32 if args.fp8_recipe == "mxfp8" else 16
    needed = {what: (size, multiple) for what, size in _widths(args)}
    tokens = (args.seq_length or 0) * args.micro_batch_size // args.context_parallel_size
    if multiple == 32 and args.sequence_parallel:
        tokens //= args.tensor_model_parallel_size
    blackwell = multiple == 16 and capability >= (10, 0)
    needed["--micro-batch-size x --seq-length"] = tokens, 8 if blackwell else multiple
    for what, (size, multiple) in needed.items():
        if size % multiple:
            yield (
                f"--fp8-recipe {args.fp8_recipe} needs multiples of {multiple}, but {what} is "
                f"{size:,} on a rank: change it, or drop --fp8-format"
            )


def _widths(args: Namespace) -> Iterator[tuple[str, int]]:
    """Yield the widths of a rank's FP8 layers that depend on flags alone."""
    ranks, shape = args.tensor_model_parallel_size, with_shape(args)
    yield "--hidden-size", args.hidden_size
    if args.num_experts and args.moe_ffn_hidden_size:
        split = args.expert_tensor_parallel_size or ranks
        yield "--moe-ffn-hidden-size", args.moe_ffn_hidden_size // split
    elif not args.match_ffn_width:
        default = int(args.hidden_size * 8 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size
        yield "--ffn-hidden-size", (args.ffn_hidden_size or default) // ranks
    if args.multi_latent_attention or args.hybrid_layer_pattern:
        return
    heads = shape.num_attention_heads // ranks
    yield "--num-attention-heads x --kv-channels", heads * shape.kv_channels
    if not (trailing_rows(shape) or switch_rows(shape)):  # which are padded
        groups = max(shape.num_query_groups // ranks, 1)
        yield "the width of query, key and value", (heads + 2 * groups) * shape.kv_channels


def needs_cuda(kernel: str) -> bool:
    """Return whether a kernel of --attention-kernel, or its gate kernels, needs CUDA."""
    return not CUDA_KERNELS.isdisjoint(kernel.split("+"))
