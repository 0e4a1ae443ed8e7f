"""Tiny runs of training: their flags, and what stands in their folders."""

import json
import shlex
from pathlib import Path
from typing import Any

# What a test says behind them counts.
TINY = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --log-interval 1
""")
UNTIED = ["--untie-embeddings-and-output-weights"]
MOCK = shlex.split("""
    --tokenizer-type NullTokenizer --vocab-size 255 --mock-data --eval-iters 1 --eval-interval 100
    --num-workers 0
""")


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return records(run / "metrics.jsonl")


def steps(run: Path) -> list[dict[str, Any]]:
    """Those of steps."""
    return [line for line in metrics(run) if "lm_loss" in line]


def resumed_from(run: Path) -> list[int | None]:
    """The step from which each start went on."""
    return [start["resumed_from"] for start in records(run / "starts.jsonl")]
