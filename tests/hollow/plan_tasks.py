"""Tasks for the server of tests/hollow: a rank of a plan."""

from typing import Any

from megasink.plan import rank


class _Written(BaseException):
    """The record is there, and the rank would end its process."""


def step(flags: list[str], number: int = 0, ranks: int = 1) -> dict[str, Any]:
    """What `rank.step_as` records as rank `number` of `ranks`."""
    found: list[dict[str, Any]] = []

    def write(record: dict[str, Any]) -> None:
        found.append(record)
        raise _Written

    try:
        rank.step_as(number, ranks, flags, write)
    except BaseException:
        if not found:
            raise
    return found[0]
