"""What a command line gets wrong about explicit gates."""

from argparse import Namespace


def problems(args: Namespace) -> list[str]:
    """A sentence for each."""
    return []
