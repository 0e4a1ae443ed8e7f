"""Tasks for the workers."""

from unittest import mock

from torch.distributed import FileStore, get_rank

from megasink.cli import main
from megasink.probe.ranks import Ranks
from megasink.report import ablation


def ablated(command: str, store: str) -> int:
    """The command, by processes that share the points."""
    ranks = Ranks(FileStore(store, 2), get_rank(), 2)
    with (
        mock.patch.object(Ranks, "from_environment", return_value=ranks),
        mock.patch.object(ablation, "draw_all", return_value={}),
    ):
        return main(command.split())
