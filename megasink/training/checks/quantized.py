"""Checks of FP8 linear layers (--fp8-format), around attention in bfloat16."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.upstream.versions import have_transformer_engine


def problems(args: Namespace) -> Iterator[str]:
    if args.fp8 is None:
        return
    if not args.bf16:
        yield "--fp8-format: attention does not run in FP8: add --bf16, its type"
    # None: the default, which depends on the device.
    if args.transformer_impl not in (None, "transformer_engine") or not have_transformer_engine():
        yield (
            "--fp8-format: the linear layers are TransformerEngine's (pip install "
            "'transformer-engine[pytorch]', a GPU, --transformer-impl transformer_engine): use "
            "--bf16 alone"
        )
    if args.fp8_param_gather:
        yield "--fp8-format with --fp8-param-gather: initial weights are drawn in bf16: drop it"
