"""Checks of --transformer-impl. Without the flag it depends on the device, and only ranks know."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.attention.variants.gate_options import gates_explicitly
from megasink.upstream.versions import have_transformer_engine


def problems(args: Namespace) -> Iterator[str]:
    impl, half = args.transformer_impl, args.bf16 or args.fp16
    if impl == "inference_optimized":
        yield (
            "--transformer-impl inference_optimized has no backward pass and cannot train: "
            "use local or transformer_engine"
            + (" (or set --head-balance-coeff 0)" if args.head_balance_coeff else "")
        )
    if args.fp32_residual_connection and impl == "local" and half:
        yield (
            "--fp32-residual-connection with --transformer-impl local in half precision: torch's "
            "norms would pass float32 to half-precision weights: drop one of the two"
        )
    fused = impl == "transformer_engine" and gates_explicitly(args)
    if fused and args.gate_position == "output" and args.gate_input == "hidden":
        yield (
            "--gate-position output needs the normed hidden state, which TransformerEngine "
            "keeps inside linear_qkv: use --transformer-impl local or --gate-position sdpa"
        )
    if args.fp8 is not None:
        yield from _quantized(args)


def _quantized(args: Namespace) -> Iterator[str]:
    """Check FP8 linear layers (--fp8-format) around attention in bfloat16."""
    if not args.bf16:
        yield "--fp8-format: attention does not run in FP8: add --bf16 for attention"
    # None: the default, which depends on the device.
    if args.transformer_impl not in (None, "transformer_engine") or not have_transformer_engine():
        yield (
            "--fp8-format: FP8 needs TransformerEngine's linear layers (pip install "
            "'transformer-engine[pytorch]', a GPU, --transformer-impl transformer_engine): drop "
            "the flag"
        )
