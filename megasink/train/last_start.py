"""What a run folder says about the run's last start, and where a resume goes on."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megasink.checkpoint.intact import newest_intact
from megasink.config import RESUME
from megasink.errors import UserError
from megasink.train.run_dir import has_finished_step


def from_where(run_dir: Path) -> str:
    """What the ranks of a start with --resume auto will find."""
    try:
        return f"going on from step {newest_intact(run_dir / 'checkpoints')[0]}"
    except UserError:
        return "no whole checkpoint there, starting at step 0"


def last_start(run_dir: Path) -> dict[str, Any]:
    """The last line of starts.jsonl; empty where there is none."""
    starts = run_dir / "starts.jsonl"
    lines = starts.read_text(errors="replace").splitlines() if starts.is_file() else []
    for line in reversed(lines):
        with suppress(ValueError, TypeError, RecursionError):  # cut short by a kill
            return dict(json.loads(line))
    return {}  # the ranks will say that there is no run


def flags_of_last_start(run_dir: Path, given: Sequence[str] = ()) -> list[str]:
    """What the run was started with, so that a resume need not repeat it: to go before `given`."""
    flags: list[str] = []
    for flag in last_start(run_dir).get("command", [])[1:]:
        before = flags[-1] if flags else ""
        if before == "--run-dir" or (before == "--resume" and flag in RESUME):
            flags.pop()
        elif not flag.startswith(("--run-dir=", "--resume=")):
            flags.append(flag)
    flags = [flag for flag in flags if flag != "--resume"]
    if given and flags[-len(given) :] == list(given):
        return flags[: -len(given)]  # the same line once more, as a scheduler gives it
    if given and not has_finished_step(run_dir):
        return []  # the corrected line of a start that failed
    return flags
