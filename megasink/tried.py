"""What megasink was tried with, in one place; docs/integrations.md shows it as a table."""

import re
from typing import NamedTuple

HEART = ("0.17.1", "0.20.0")
"""Oldest and newest Megatron-Core with which `megasink.megatron` was tried in a loop of its own."""
TRAINER = ((0, 19), (0, 21))
"""The releases of Megatron-Core that `megasink train` takes, without the last: it patches them."""


class Trial(NamedTuple):
    """A version of a stack that was tried.

    Attributes:
        stack: Who trains.
        version: A release, a tag, or the day of a commit of the main branch.
        state: "tested" with every run of the tests, "run" by hand, or "read"; and what was found.
    """

    stack: str
    version: str
    state: str


TRIALS = (
    Trial(
        "bare Megatron-Core",
        "0.19.2",
        "tested: losses, gradient norms and importances of `megasink train`",
    ),
    Trial(
        "the same without any patch of Megatron, as in forks",
        "0.19.2",
        "tested: losses of four steps, sink and gated, within 1e-6 of those with the patches",
    ),
    Trial(
        "the same, older and newer",
        "0.17.1, 0.18.2, main of 2026-08-22 (0.20.0)",
        "run: the same four steps, to the bit as under 0.19.2; before 0.19 a warning names what is "
        "missing",
    ),
    Trial("the same, too old", "0.16.1", "run: ends in a line with what it lacks"),
    Trial(
        "`pretrain` of `megatron.training`, `--spec`",
        "0.19.2",
        "tested, on one CPU rank: losses, gradient norms and importances of `megasink train`",
    ),
    Trial(
        "`pretrain_gpt.py` of Megatron-LM, unchanged",
        "core_v0.19.0",
        "run by hand, on one CPU rank: the numbers of the row above",
    ),
    Trial(
        "Megatron-Bridge",
        "0.6.2, on Megatron-Core 0.19.2",
        "its provider and its training step run on a CPU, with names that do nothing for "
        "TransformerEngine, ModelOpt and Energon: losses and importances of the bare loop to the "
        "bit; `pretrain` and its checkpoints read",
    ),
    Trial(
        "slime",
        "main of 2026-08-21, on Megatron-Core 0.19.2",
        "its `model_provider.py` and `train_one_step` run on a CPU, unchanged; its data, loss and "
        "Ray read",
    ),
)


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as (0, 19, 2), to compare it."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
