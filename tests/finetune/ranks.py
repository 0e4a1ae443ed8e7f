"""Run a program of several processes to its end."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def ended(words: Iterable[object], folder: Path, seconds: float = 300) -> tuple[int, str]:
    """The exit code of ``python -m WORDS``, and all that it said."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *map(str, words)],
        env=environment | {"XDG_STATE_HOME": str(folder / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        cwd=folder,
    )
    return done.returncode, done.stdout
