"""Command lines of training, parsed and checked in this process, where no platform is chosen."""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from unittest import mock

from megasink import cpu
from megasink.errors import ConfigError
from megasink.training import parse_arguments, preflight, recipes
from megasink.training.checks import all_checks
from megasink.upstream import fused_kernels


def read(flags: Sequence[str]) -> Namespace:
    """The arguments of a line, as on a machine with GPUs and TransformerEngine."""
    with (
        mock.patch.object(cpu, "cuda_present", return_value=True),
        mock.patch.object(fused_kernels, "defaults", return_value={}),
    ):
        return parse_arguments.read(flags)


def refuse(flags: Sequence[str], ranks: int | None) -> None:
    """Refuse a line that is wrong on any device.

    Raises:
        ConfigError: with every problem.
    """
    args = read(recipes.expanded(flags))
    args.world_size = ranks or parse_arguments.replica_ranks(args)
    if problems := all_checks.of_line(args)[0]:
        raise ConfigError(problems)


def check(lines: Iterable[preflight.Line]) -> Iterator[Namespace]:
    """Check lines as `preflight.check` does for a CPU, without reading data sets and tokenizers."""
    for line in lines:
        flags = ["--transformer-impl", "local", *line.flags]
        refuse(flags, line.ranks)
        yield read(flags)
