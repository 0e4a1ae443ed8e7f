"""What a command line gets wrong about masks and positions."""

from argparse import Namespace


def problems(args: Namespace) -> list[str]:
    """A sentence for each."""
    return []
