"""Command lines of `megasink finetune`, and programs of several processes, run to their end."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.forkserver import HANG_SECONDS, ROOT

SHAPE = "--seq-length 128 --global-batch-size 4 --micro-batch-size 2 --lr 1e-2 --seed 7"
COEFF = 1.0


def ended(
    words: Iterable[object], folder: Path, seconds: float = HANG_SECONDS, **variables: str
) -> tuple[int, str]:
    """The exit code of ``python -m WORDS``, and all that it said."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        cwd=folder,
    )
    return done.returncode, done.stdout


def command(root: Path, *flags: str, out: str = "out", data: str = "chats.jsonl") -> list[str]:
    """The command line for the model and data of `root`."""
    words = f"finetune {root}/model --data {root}/{data} --output {root}/{out} {SHAPE}"
    return [*words.split(), "--head-balance-coeff", str(COEFF), *flags]
