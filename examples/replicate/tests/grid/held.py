"""A run of a grid that waits behind its third step for a signal."""

from typing import NoReturn

from examples.replicate.grid import child
from megasink.training.metrics_file import MetricsFile
from megasink.training.stop import RankState
from tests.waiting import until

_write = MetricsFile.write


def write(self: MetricsFile, record: dict[str, object]) -> None:
    _write(self, record)
    if record.get("iteration") == 3:
        until(lambda: RankState.signal)


def become(task: child.Task) -> NoReturn:
    MetricsFile.write = write  # type: ignore[method-assign]
    child.become(task)
