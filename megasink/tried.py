"""Versions of Megatron-Core that megasink was tested with (docs/integrations.md lists them)."""

import re

HEART = ("0.17.1", "0.20.0")
"""Oldest and newest Megatron-Core with which `megasink.megatron` was tested in a bare loop."""
TRAINER = ((0, 19), (0, 21))
"""Range of Megatron-Core that `megasink train` patches and accepts; the upper bound is excluded."""


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as (0, 19, 2), for comparison."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
