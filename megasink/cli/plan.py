"""``megasink plan``: estimate memory and communication of a run, without its GPUs."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Plan a run; see `megasink.plan.launch`."""
    from megasink.plan.launch import main

    return main(argv)
