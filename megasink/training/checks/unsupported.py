"""Megatron options that megasink refuses in every run, with the reason."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.megatron_flags import refused


def problems(args: Namespace) -> Iterator[str]:
    yield from (f"{flag}: {why}" for flag, _, why in refused(args, "always"))
