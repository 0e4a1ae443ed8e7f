"""Command lines, and what is wrong with them: the table command_lines.txt, of test_checks.py.

A part of the table is `refused` or `accepted`, and says which flags come before those of its cases.
A case is its name and flags, and under it a line for each problem, of which the message must hold
that phrase; deeper lines go on with the one above. What only Megatron asserts stands alone in its
line, since it says one thing at a time.
"""

import re
import shlex
from pathlib import Path

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 4 --lr 1e-3 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope"
).split()
MOCK = [*MODEL, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "256"]


def _without(*flags: str) -> list[str]:
    """MOCK without some flags and their values."""
    at = {place for flag in flags for place in (MOCK.index(flag), MOCK.index(flag) + 1)}
    return [word for place, word in enumerate(MOCK) if place not in at]


STARTS = {
    "MODEL": MODEL,
    "MOCK": MOCK,
    "GATED": [*MOCK, "--attention-variant", "gated"],
    "UNGATED": [flag for flag in MOCK if flag != "--swiglu"],
    "PATTERN": _without("--num-layers"),  # their number is that of the pattern
    "SAMPLES": _without("--train-iters"),
    "LEFT_OUT": _without(
        "--seq-length", "--lr", "--train-iters", "--micro-batch-size", "--hidden-size"
    ),
    "NOTHING": [],
}
REFUSED: dict[str, tuple[list[str], list[str]]] = {}
"""{name: (flags, one phrase per problem)}."""
ACCEPTED: dict[str, list[str]] = {}
"""{name: flags}."""


def _read(text: str) -> None:
    kind, start, phrases = "", "", list[str]()
    for line in re.sub(r"\n {4}", " ", text.strip()).splitlines():
        name, _, flags = line.partition(":")
        if line.startswith("== "):
            _, kind, start = line.split()
        elif line.startswith("  ! "):
            phrases.append(line.removeprefix("  ! "))
        elif kind == "refused":
            phrases = []
            REFUSED[name] = ([*STARTS[start], *shlex.split(flags)], phrases)
        else:
            ACCEPTED[name] = [*STARTS[start], *shlex.split(flags)]


_read(Path(__file__).with_suffix(".txt").read_text())
