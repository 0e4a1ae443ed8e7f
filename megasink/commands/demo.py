"""``megasink demo``: attention sinks form, and the head-balance loss evens the heads out."""

from collections.abc import Sequence
from pathlib import Path

from megasink.command_line import CommandParser
from megasink.errors import UserError

STEPS = 600


def main(argv: Sequence[str] | None = None) -> int:
    """Train a small model twice, without the head-balance loss and with it, and compare the heads.

    The text is a synthetic language in which an attention sink forms in less than a minute. Two
    gloo or CUDA ranks; two minutes on two CPU cores.
    """
    parser = CommandParser(prog="megasink demo", description=main.__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"), help="folder to write to")
    parser.add_argument("--train-iters", type=int, default=STEPS, help="training steps")
    args = parser.parse_args(argv)
    if args.train_iters < 1:
        raise UserError(f"--train-iters {args.train_iters}: use 1 or more")
    from megasink.commands.demo_runs import demonstrate

    demonstrate(args.dir, args.train_iters)
    return 0
