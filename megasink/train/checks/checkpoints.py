"""Checks of checkpoint saving."""

from argparse import Namespace


def problems(args: Namespace) -> list[str]:
    """Return one message per problem."""
    found = []
    if args.exit_signal_handler_for_training:
        found.append(
            "--exit-signal-handler-for-training ends a run without a checkpoint: drop it (on "
            "SIGTERM one is saved)"
        )
    if not args.async_save:
        return found
    if not (args.run_dir or args.save):
        found.append("--async-save without --run-dir or --save saves nothing: give one of them")
    if args.ckpt_format != "torch_dist":
        found.append(f"--async-save with --ckpt-format {args.ckpt_format}: use torch_dist")
    if args.async_strategy != "mcore":
        found.append(
            f"--async-strategy {args.async_strategy}: its writer may outlive a rank that is "
            "killed: use mcore"
        )
    if args.async_ckpt_use_cpu_shm:
        found.append("--async-ckpt-use-cpu-shm is for --async-strategy nvrx alone: drop it")
    return found
