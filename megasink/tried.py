"""Versions of Megatron-Core that megasink was tried with; docs/integrations.md has each trial."""

import re

HEART = ("0.17.1", "0.20.0")
"""Oldest and newest Megatron-Core with which `megasink.megatron` was tried in a loop of its own."""
TRAINER = ((0, 19), (0, 21))
"""The releases of Megatron-Core that `megasink train` takes, without the last: it patches them."""


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as (0, 19, 2), to compare it."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
