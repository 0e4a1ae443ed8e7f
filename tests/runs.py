"""Tiny runs of training: their flags, and what stands in their folders."""

import asyncio
import json
import shlex
import textwrap
from pathlib import Path
from typing import Any

SOURCES = Path(asyncio.__file__).parent
"""Real text that no commit changes."""

# What a test says behind them counts.
TINY = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --log-interval 1
""")
UNTIED = ["--untie-embeddings-and-output-weights"]
MOCK = shlex.split("""
    --tokenizer-type NullTokenizer --vocab-size 256 --mock-data --eval-iters 1 --eval-interval 100
    --num-workers 0
""")


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a .jsonl file, but for one that is being written."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return records(run / "metrics.jsonl")


def steps(run: Path) -> list[dict[str, Any]]:
    """Those of steps."""
    return [line for line in metrics(run) if "lm_loss" in line]


def resumed_from(run: Path) -> list[int | None]:
    """The step from which each start went on."""
    return [start["resumed_from"] for start in records(run / "starts.jsonl")]


def short_documents(folder: Path) -> list[str]:
    """The flags of a data set of many short documents, the lines of a module."""
    from megasink.data.corpus import Corpus
    from megasink.data.hf_tokenizer import train_tokenizer
    from megasink.data.preprocess import preprocess

    lines = [line for line in Path(textwrap.__file__).read_text().splitlines() if line.strip()]
    texts = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (folder / "documents.jsonl").write_text(texts)
    corpus = Corpus([str(folder / "documents.jsonl")])
    train_tokenizer(corpus, 400, folder / "tokenizer")
    preprocess(corpus, folder / "text", folder / "tokenizer", workers=1)
    return ["--data-path", str(folder / "text"), "--tokenizer-model", str(folder / "tokenizer")]
