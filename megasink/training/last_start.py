"""Read a run's last start and its resume point from its folder."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasink.checkpoints.intact import newest_intact
from megasink.errors import UserError
from megasink.files.json_file import objects_in, read_text
from megasink.training.flag_file import named_values
from megasink.training.run_dir import has_finished_step


def from_where(run_dir: Path) -> str | None:
    """Describe where the ranks will start with --resume, and the damage to newer checkpoints.

    None without an intact one: --resume auto starts at step 0, --resume reports an error.
    """
    try:
        step, damaged = newest_intact(run_dir / "checkpoints", quick=True)
    except UserError:
        return None
    skipped = [f"; the checkpoint of step {at} is damaged: {why}" for at, why in damaged.items()]
    return f"continuing from step {step}{''.join(skipped)}"


def finished(run_dir: Path, args: Namespace) -> str | None:
    """Return a sentence if a run has no step left to train or evaluate; else None."""
    if args.skip_train or not args.train_iters:
        return None
    try:
        step, _ = newest_intact(run_dir / "checkpoints", quick=True)
    except UserError:
        return None
    if step < args.train_iters:
        return None
    return f"run {run_dir} has finished: step {step} of {args.train_iters}; --skip-train evaluates"


def last_start(run_dir: Path) -> dict[str, Any]:
    """Return the last record of starts.jsonl; empty if there is none."""
    starts = run_dir / "starts.jsonl"
    lines = read_text(starts, errors="replace").splitlines() if starts.exists() else []
    for start in objects_in(reversed(lines)):
        words, ranks = start.get("command", []), start.get("world_size", 0)
        if isinstance(words, list) and {*map(type, words)} <= {str} and type(ranks) is int:
            return start
    return {}  # the ranks will report that there is no run


def flags_of_last_start(run_dir: Path, given: Sequence[str] = ()) -> list[str]:
    """Return the flags of the last start, to prepend to `given` on resume."""
    words = last_start(run_dir).get("command", [])[1:]
    kept = [flag for flag in named_values(words) if flag[0] not in ("run-dir", "resume")]
    repeated = list(named_values(given))
    if repeated and kept[-len(repeated) :] == repeated:
        kept = kept[: -len(repeated)]  # the same command line again, as schedulers do
    elif repeated and not has_finished_step(run_dir):
        kept = []  # a corrected command line after a failed start
    return [word for name, values in kept for word in (f"--{name}", *values)]


def ranks_of_last_start(run_dir: Path) -> int | None:
    """Return the last start's rank count, if it was one machine."""
    last = last_start(run_dir)
    ranks: int = last.get("world_size", 0)
    return ranks if ranks and last.get("local_world_size", ranks) == ranks else None
