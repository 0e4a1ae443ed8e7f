"""A grid of configurations and seeds as one file -> runs, a table, figures."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from examples.replicate.grid.file import read_grid
from megasink.console.printable import say
from megasink.console.progress import progress
from megasink.errors import ConfigError
from megasink.files.output_folder import exclusive
from megasink.options.command_parser import CommandParser
from megasink.options.extras import require_train


def main(argv: Sequence[str] | None = None) -> int:
    """Train every cell of a grid with every seed, measure the runs, and summarize them.

    FILE is TOML (README.md beside this file). Each finished run leaves OUTPUT/CELL/seed-N.json; a
    repeated command skips it and goes on with the others. Writes results.json, table.csv, table.md,
    grid.png and curves.png. Exit code 2 if a run failed.
    """
    require_train("a grid")
    parser = _parser()
    args = parser.parse_args(argv)
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs}: use 1 or more")
    threads = _threads()
    grid = read_grid(args.file)
    from examples.replicate.grid.hardware import cores
    from examples.replicate.grid.outputs import write_figures, write_results
    from examples.replicate.grid.plan import begin, plan
    from examples.replicate.grid.schedule import run_all

    runs = plan(grid, args.output)
    forked = all(run.way.name == "fork" for run in runs)
    jobs = args.jobs or (max(1, cores() // threads) if forked else 1)
    with exclusive(args.output):
        begin(grid, args.output, runs)
        count = f"{len(grid.cells)} cells x {len(grid.seeds)} seeds = {len(runs)} runs"
        say(f"grid {args.output}: {count}, {jobs} at a time")
        for way in dict.fromkeys(run.way for run in runs):
            what = f"forked, {threads} threads each" if way.name == "fork" else "launched"
            say(f"runs are {what}: {way.why}" if forked else f"some runs are {what}: {way.why}")
        outcome = run_all(
            runs,
            grid,
            args.output,
            jobs=jobs,
            threads=threads,
            after=partial(write_results, grid, args.output),
        )
        results = write_results(grid, args.output, outcome)
        with progress("figures", None, "figures"):
            write_figures(results, args.output)
        from examples.replicate.grid.table import print_table

        print_table(results)
        say(f"wrote {args.output}/results.json, table.csv, table.md, grid.png, curves.png")
        for name, failure in outcome.failures.items():
            print(f"grid: error: {name}: {failure}", file=sys.stderr)
        return 2 if outcome.failures else 0


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m examples.replicate.grid", description=main.__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="the grid")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="runs side by side (default: cores / OMP_NUM_THREADS for runs of one CPU rank, else "
        "1; a rank has one thread where OMP_NUM_THREADS is not set)",
    )
    return parser


def _threads() -> int:
    given = os.environ.get("OMP_NUM_THREADS", "1")
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"OMP_NUM_THREADS {given!r}: use a whole number, 1 or more")
    return int(given)
