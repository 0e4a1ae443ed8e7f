"""What a run folder says about the run's last start, and where a resume goes on."""

import json
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megasink.checkpoint.intact import newest_intact
from megasink.errors import UserError
from megasink.train.early import cuda_devices, replica_ranks
from megasink.train.replay import named_values
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
    words = last_start(run_dir).get("command", [])[1:]
    kept = [flag for flag in named_values(words) if flag[0] not in ("run-dir", "resume")]
    repeated = list(named_values(given))
    if repeated and kept[-len(repeated) :] == repeated:
        kept = kept[: -len(repeated)]  # the same line once more, as a scheduler gives it
    elif repeated and not has_finished_step(run_dir):
        kept = []  # the corrected line of a start that failed
    return [word for name, values in kept for word in (f"--{name}", *values)]


def ranks_of_last_start(run_dir: Path, args: Namespace) -> int | None:
    """As many as the last start had, if it was on one machine and these flags allow it here."""
    last = last_start(run_dir)
    ranks = int(last.get("world_size", 0))
    if not ranks or last.get("local_world_size", ranks) != ranks:
        return None
    if 0 < cuda_devices(args) < ranks:
        return None
    return None if ranks % replica_ranks(args) else ranks
