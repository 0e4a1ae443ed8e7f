"""What a command line gets wrong about the layers around attention."""

from argparse import Namespace


def problems(args: Namespace) -> list[str]:
    """A sentence for each."""
    return []
