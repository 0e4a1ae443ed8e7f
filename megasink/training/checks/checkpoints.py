"""Checks of checkpoint saving."""

from argparse import Namespace
from collections.abc import Iterator


def problems(args: Namespace) -> Iterator[str]:
    if args.exit_signal_handler_for_training:
        yield (
            "--exit-signal-handler-for-training ends a run without a checkpoint: drop it (on "
            "SIGTERM one is saved)"
        )
    if not args.async_save:
        return
    if not (args.run_dir or args.save):
        yield "--async-save without --run-dir or --save saves nothing: give one of them"
    if args.ckpt_format != "torch_dist":
        yield f"--async-save with --ckpt-format {args.ckpt_format}: use torch_dist"
    if args.async_strategy != "mcore":
        yield (
            f"--async-strategy {args.async_strategy}: its writer may outlive a rank that is "
            "killed: use mcore"
        )
    if args.async_ckpt_use_cpu_shm:
        yield "--async-ckpt-use-cpu-shm works only with --async-strategy nvrx: drop it"
