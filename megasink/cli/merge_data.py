"""`megasink merge-data`: join the parts that several machines made."""

from collections.abc import Sequence
from pathlib import Path

from megasink.command_line import CommandParser
from megasink.printable import say


def main(argv: Sequence[str]) -> int:
    """Join PREFIX-1-of-N ... PREFIX-N-of-N of `megasink data --partition` to PREFIX.

    The .bin and .idx have the bytes of a run without --partition. The parts stay.
    """
    parser = CommandParser(prog="megasink merge-data", description=main.__doc__)
    parser.add_argument("prefix", type=Path, metavar="PREFIX", help="the --output of the parts")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    args = parser.parse_args(argv)
    from megasink.data.merge import merge

    merged = merge(args.prefix, overwrite=args.overwrite)
    say(
        f"{merged['documents']:,} documents, {merged['tokens']:,} tokens\n"
        f"wrote {args.prefix}.bin {args.prefix}.idx; the parts may be removed"
    )
    return 0
