"""``megasink train``: start one node's ranks; even during imports a signal gives one line."""

from collections.abc import Sequence

from megasink.training.stop import ending_at_once


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks; see `megasink.training.launch`."""
    with ending_at_once():
        from megasink.training.launch import main

        return main(argv)
