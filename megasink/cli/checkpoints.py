"""``megasink checkpoints``: list and verify the checkpoints of a run."""

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.filesize import decimal

from megasink.checkpoints.damage import checkpoint_path, iterations
from megasink.checkpoints.find import Saved, runs_in, saved_checkpoints
from megasink.console.json_output import add_json, as_text
from megasink.console.printable import say
from megasink.console.progress import progress
from megasink.errors import ConfigError, UserError
from megasink.files.json_file import objects_in, open_file, read_object
from megasink.options.command_parser import CommandParser
from megasink.training.lease import writer_of

_STEP = re.compile(rb'"iteration": (\d{1,18})\b')


class _Run(NamedTuple):
    """A run folder, or a bare folder of checkpoints."""

    folder: Path | None
    checkpoints: Path


def main(argv: Sequence[str] | None = None) -> int:
    """List the checkpoints of a run, and mark the one that a resume uses.

    By default only file sizes are checked. --verify reads every checkpoint, even while the run is
    training.
    """
    parser = CommandParser(prog="megasink checkpoints", description=main.__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder or its checkpoints")
    text = "verify all checksums; exit code 2 if a checkpoint is damaged"
    parser.add_argument("--verify", action="store_true", help=text)
    add_json(parser)
    args = parser.first_screen("megasink checkpoints runs/mine").parse_args(argv)
    return _show(_run(args.run), verify=args.verify, json=args.json)


def _run(path: Path) -> _Run:
    """Resolve a run folder, or the folder of its checkpoints."""
    if not path.is_dir():
        raise UserError(f"{path} does not exist: give a run folder or its checkpoint folder")
    own = path / "checkpoints"
    checkpoints = own if own.is_dir() else path
    folder = next((f for f in (path, path.resolve().parent) if (f / "config.json").is_file()), None)
    arguments: dict[str, Any] = {}
    if folder is not None:
        saved = read_object(folder / "config.json").get("arguments")
        arguments = saved if isinstance(saved, dict) else {}
    if not any(checkpoints.glob("iter_*")):
        elsewhere = arguments.get("save")
        hint = ""
        if isinstance(elsewhere, str) and Path(elsewhere).resolve() != own.resolve():
            hint = f" (the run saved to {elsewhere}: pass that folder)"
        raise UserError(f"{path} {(not hint and runs_in(path)) or f'has no checkpoint{hint}'}")
    return _Run(folder, checkpoints)


def _show(run: _Run, *, verify: bool, json: bool) -> int:
    """Print the checkpoints."""
    with _verifying(run.checkpoints, verify=verify) as tell:
        saved = saved_checkpoints(run.checkpoints, checksums=verify, tell=tell)
    records = _records(saved, _tokens(run, {one.iteration for one in saved}))
    if json:
        print(as_text({"checkpoints": records, "verified": verify}), flush=True)
    with redirect_stdout(sys.stderr if json else sys.stdout):
        for line in _lines(records, verified=verify):
            say(line)
        if run.folder and (writer := writer_of(run.folder)):
            say(
                f"a trainer ({writer}) is writing to the folder: the newest checkpoint may be "
                "unfinished"
            )
    damaged = [
        f"step {one.iteration}: {one.problem}" for one in saved if one.problem and not one.is_aside
    ]
    if verify and damaged:
        raise ConfigError(damaged)
    return 0


@contextmanager
def _verifying(checkpoints: Path, *, verify: bool) -> Iterator[Callable[[Path, int], None]]:
    """Show the number of verified bytes, and the time left."""
    if not verify:
        yield lambda *_: None
        return
    folders = [checkpoint_path(checkpoints, step) for step in iterations(checkpoints)]
    total, read = sum(file.stat().st_size for f in folders for file in f.glob("*.distcp")), 0
    with progress("verifying", total, "bytes") as advance:

        def tell(folder: Path, size: int) -> None:
            nonlocal read
            read += size
            advance(read, folder.name)

        yield tell


def _records(saved: list[Saved], tokens: dict[int, int]) -> list[dict[str, Any]]:
    """Return the checkpoints for JSON."""
    # From which --resume auto starts.
    newest = max((one.iteration for one in saved if one.problem is None), default=None)
    return [
        {
            "step": one.iteration,
            "folder": str(one.folder),
            "tokens": tokens.get(one.iteration),
            "bytes": one.size,
            "time": one.time,
            "problem": one.problem,
            "resumes": one.problem is None and one.iteration == newest,
        }
        for one in saved
    ]


def _lines(records: list[dict[str, Any]], *, verified: bool) -> Iterator[str]:
    """Yield one aligned line for each checkpoint, below a heading."""
    rows = [("step", "tokens", "size", "saved", "state")]
    for one in records:
        tokens, then = one["tokens"], time.localtime(one["time"])
        state = f"damaged: {one['problem']}" if one["problem"] else "intact"
        state = "verified" if verified and not one["problem"] else state
        rows.append(
            (
                f"{one['step']:,}",
                "-" if tokens is None else f"{tokens:,}",
                decimal(one["bytes"]),
                time.strftime("%Y-%m-%d %H:%M", then) if one["time"] else "-",
                state + "; --resume auto uses it" * one["resumes"],
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = list(zip(row, widths, strict=True))
        words = [word.rjust(width) for word, width in pairs[:3]]
        words += [word.ljust(width) for word, width in pairs[3:]]
        yield "  ".join(words).rstrip()


def _tokens(run: _Run, wanted: set[int]) -> dict[int, int]:
    """Return the number of trained tokens after some of the run's steps."""
    tokens_at: dict[int, int] = {}
    path = Path(run.folder or "", "metrics.jsonl")
    with suppress(OSError, UserError), open_file(path) as file:
        for line in file:
            # A run has many more steps than checkpoints: parse the lines of those.
            step = _STEP.search(line)
            if step and int(step[1]) in wanted:
                for record in objects_in([line]):
                    if isinstance(tokens := record.get("tokens"), int):
                        tokens_at[int(step[1])] = tokens
    return tokens_at
