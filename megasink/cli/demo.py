"""``megasink demo``: attention sinks form, and the head-balance loss balances the heads."""

import re
from collections.abc import Sequence
from pathlib import Path

from megasink.errors import UserError
from megasink.files.output_folder import OF_SYSTEM, folder_problem
from megasink.options.command_parser import CommandParser

STEPS = 600
# Files of earlier demos: the language and its tokenizer, and a folder of runs for each.
_OWN = re.compile(r"language\.\w+|tokenizer|\d{8}-\d{6}")


def main(argv: Sequence[str] | None = None) -> int:
    """Train a small model twice, without the head-balance loss and with it, and compare the heads.

    The text is a synthetic language in which an attention sink forms in less than a minute. The
    demo runs two gloo or CUDA ranks, and takes two minutes on two CPU cores.
    """
    parser = CommandParser(prog="megasink demo", description=main.__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder to write to")
    parser.add_argument("--train-iters", type=int, default=STEPS, help="training steps")
    args = parser.first_screen("megasink demo").parse_args(argv)
    if args.train_iters < 1:
        raise UserError(f"--train-iters {args.train_iters}: use 1 or more")
    if problem := folder_problem(args.output):
        raise UserError(f"--output {args.output} {problem}")
    paths = args.output.iterdir() if args.output.is_dir() else ()
    there = [path.name for path in paths if not any(map(path.match, OF_SYSTEM))]
    other = sorted(name for name in there if not _OWN.fullmatch(name))
    if other or (there and "language.jsonl" not in there):
        name = (other or there)[0]
        raise UserError(f"--output {args.output} holds {name}, not a demo: choose another folder")
    from megasink.cli.demo_runs import demonstrate

    demonstrate(args.output, args.train_iters)
    return 0
