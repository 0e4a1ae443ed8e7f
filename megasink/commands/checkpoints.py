"""``megasink checkpoints``: list, verify and prune the checkpoints of a run."""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.filesize import decimal

from megasink.checkpoint.intact import checkpoint_path, iterations
from megasink.checkpoint.saved import Saved, delete, kept, saved_checkpoints
from megasink.command_line import CommandParser
from megasink.errors import ConfigError, UserError
from megasink.json_file import read_object
from megasink.json_output import add_json, only_json
from megasink.printable import say
from megasink.progress import progress
from megasink.train.lease import Lease, writer_of

_STEP = re.compile(rb'"iteration": (\d{1,18})\b')


class _Run(NamedTuple):
    """A run folder, or a bare folder of checkpoints.

    Attributes:
        folder: with config.json; None if there is none.
        checkpoints: with the iter_NNNNNNN folders.
        rule: --save-retain-interval of its last start.
    """

    folder: Path | None
    checkpoints: Path
    rule: int | None


def main(argv: Sequence[str] | None = None) -> int:
    """List the checkpoints of a run, and say which of them its rule keeps.

    By default only file sizes are checked. --verify reads every checkpoint, also while the run is
    training. --prune deletes what the rule does not keep: the multiples of --save-retain-interval,
    or of --keep-every, and the newest intact checkpoint stay; damaged ones are never deleted.
    """
    parser = CommandParser(prog="megasink checkpoints", description=main.__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder, or its checkpoints")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="verify all checksums; exit code 2 if a checkpoint is damaged",
    )
    parser.add_argument(
        "--prune", action="store_true", help="delete the checkpoints that the rule does not keep"
    )
    parser.add_argument(
        "--keep-every",
        type=int,
        metavar="STEPS",
        help="keep multiples of this (default: --save-retain-interval of the run's last start)",
    )
    parser.add_argument("--dry-run", action="store_true", help="with --prune: delete nothing")
    add_json(parser)
    args = parser.parse_args(argv)
    with only_json(args.json) as emit:
        return _main(args, emit)


def _main(args: Any, emit: Callable[[Any], None]) -> int:
    run = _run(args.run)
    every = args.keep_every if args.keep_every is not None else run.rule
    if problems := list(_problems(args, run, every)):
        raise ConfigError(problems)
    if args.prune and not args.dry_run:
        assert run.folder is not None
        lease = Lease(run.folder, holder="megasink checkpoints --prune")
        try:
            return _show(run, every, emit, verify=args.verify, prune=True)
        finally:
            lease.release()
    return _show(run, every, emit, verify=args.verify, prune=False)


def _problems(args: Any, run: _Run, every: int | None) -> Iterator[str]:
    if args.keep_every is not None and args.keep_every < 1:
        yield f"--keep-every {args.keep_every}: use 1 or more"
    if args.dry_run and not args.prune:
        yield "--dry-run needs --prune: without it nothing is deleted"
    if args.prune and every is None:
        yield (
            f"--prune: {args.run} was trained without --save-retain-interval: give --keep-every "
            "STEPS"
        )
    if args.prune and run.folder is None:
        yield (
            f"--prune: {args.run} has no config.json beside it, so it cannot be told whether a run "
            "writes there: give a run folder"
        )


def _run(path: Path) -> _Run:
    """Resolve a run folder, or the folder of its checkpoints.

    Raises:
        UserError: no such folder, or it has no checkpoint.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give a run folder or its checkpoint folder")
    own = path / "checkpoints"
    checkpoints = own if own.is_dir() else path
    folder = next((f for f in (path, path.resolve().parent) if (f / "config.json").is_file()), None)
    arguments: dict[str, Any] = {}
    if folder is not None:
        found = read_object(folder / "config.json").get("arguments")
        arguments = found if isinstance(found, dict) else {}
    if not any(checkpoints.glob("iter_*")):
        elsewhere = arguments.get("save")
        hint = ""
        if isinstance(elsewhere, str) and Path(elsewhere).resolve() != own.resolve():
            hint = f" (the run saved to {elsewhere}: give that)"
        raise UserError(f"{path} has no checkpoint{hint}")
    rule = arguments.get("save_retain_interval")
    return _Run(folder, checkpoints, rule if isinstance(rule, int) and rule > 0 else None)


def _show(
    run: _Run,
    every: int | None,
    emit: Callable[[Any], None],
    *,
    verify: bool,
    prune: bool,
) -> int:
    """Print the checkpoints, and delete what the rule does not keep.

    Args:
        emit: of `only_json`, for the list.

    Raises:
        ConfigError: with `verify`, the damaged ones.
    """
    with _verifying(run.checkpoints, verify=verify) as tell:
        saved = saved_checkpoints(run.checkpoints, checksums=verify, tell=tell)
    reasons = kept(saved, every)
    tokens = _tokens(run, {one.iteration for one in saved})
    emit({"checkpoints": _records(saved, reasons, tokens), "verified": verify, "pruned": prune})
    for line in _lines(saved, reasons, tokens, verified=verify):
        say(line)
    doomed = [one for one in saved if one.folder not in reasons]
    size = decimal(sum(one.size for one in doomed))
    writer = run.folder and writer_of(run.folder)
    if prune:
        with progress("deleting", len(doomed), "checkpoints") as told:
            for count, one in enumerate(doomed, 1):
                delete(one.folder)
                told(count)
        say(f"deleted: {len(doomed)} checkpoints, {size}")
    else:
        if doomed:
            say(f"--prune would delete {len(doomed)} checkpoints, {size}")
        if writer:
            say(f"the folder is being written to ({writer}): the newest may be unfinished")
    damaged = [
        f"step {one.iteration}: {one.problem}" for one in saved if one.problem and not one.is_aside
    ]
    if verify and damaged:
        raise ConfigError(damaged)
    return 0


@contextmanager
def _verifying(checkpoints: Path, *, verify: bool) -> Iterator[Callable[[Path, int], None]]:
    """Show how many bytes are verified, and the time left."""
    if not verify:
        yield lambda *_: None
        return
    folders = [checkpoint_path(checkpoints, step) for step in iterations(checkpoints)]
    total, read = sum(file.stat().st_size for f in folders for file in f.glob("*.distcp")), 0
    with progress("verifying", total, "bytes") as told:

        def tell(folder: Path, size: int) -> None:
            nonlocal read
            read += size
            told(read, folder.name)

        yield tell


def _newest(saved: list[Saved]) -> int | None:
    """Return the step that --resume auto takes."""
    return max((one.iteration for one in saved if one.problem is None), default=None)


def _records(
    saved: list[Saved], reasons: dict[Path, str], tokens: dict[int, int]
) -> list[dict[str, Any]]:
    """Return the checkpoints for JSON."""
    newest = _newest(saved)
    return [
        {
            "step": one.iteration,
            "folder": str(one.folder),
            "tokens": tokens.get(one.iteration),
            "bytes": one.size,
            "time": one.time,
            "problem": one.problem,
            "resumes": one.problem is None and one.iteration == newest,
            "kept": reasons.get(one.folder),
        }
        for one in saved
    ]


def _lines(
    saved: list[Saved], reasons: dict[Path, str], tokens: dict[int, int], *, verified: bool
) -> Iterator[str]:
    """Yield one aligned line for each checkpoint, below a heading."""
    newest = _newest(saved)
    rows = [("step", "tokens", "size", "saved", "state", "kept")]
    for one in saved:
        is_next = one.problem is None and one.iteration == newest
        intact = "verified" if verified else "intact"
        state = f"damaged: {one.problem}" if one.problem else intact
        rows.append(
            (
                f"{one.iteration:,}",
                f"{tokens[one.iteration]:,}" if one.iteration in tokens else "-",
                decimal(one.size),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(one.time)) if one.time else "-",
                f"{state}, --resume auto takes it" if is_next else state,
                reasons.get(one.folder, "no"),
            )
        )
    yield from _aligned(rows, right=3)


def _aligned(rows: Sequence[tuple[str, ...]], right: int) -> Iterator[str]:
    """Yield the rows as lines; the first `right` columns are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = list(zip(row, widths, strict=True))
        words = [word.rjust(width) for word, width in pairs[:right]]
        words += [word.ljust(width) for word, width in pairs[right:]]
        yield "  ".join(words).rstrip()


def _tokens(run: _Run, wanted: set[int]) -> dict[int, int]:
    """Return how many tokens the run had trained on after some of its steps."""
    found: dict[int, int] = {}
    with suppress(OSError), Path(run.folder or "", "metrics.jsonl").open("rb") as file:
        for line in file:
            # A run has many more steps than checkpoints: parse the lines of those.
            step = _STEP.search(line)
            if step and int(step[1]) in wanted:
                with suppress(ValueError, TypeError, RecursionError):  # truncated by a kill
                    tokens = json.loads(line).get("tokens")
                    if isinstance(tokens, int):
                        found[int(step[1])] = tokens
    return found
