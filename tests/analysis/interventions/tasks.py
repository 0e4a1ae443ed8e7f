"""Tasks for the workers."""

from unittest import mock

from torch.distributed import FileStore, get_rank

from megasink.analysis.pages import ablation_page
from megasink.analysis.ranks import Ranks
from megasink.cli import main


def ablated(command: str, store: str) -> int:
    """The command, by processes that share the points."""
    ranks = Ranks(FileStore(store, 2), get_rank(), 2)
    with (
        mock.patch.object(Ranks, "from_environment", return_value=ranks),
        mock.patch.object(ablation_page, "pictures", return_value=[]),
    ):
        return main(command.split())
