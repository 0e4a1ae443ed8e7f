"""Task: train in a worker of the pool, with the variables of an object store."""

import os
from unittest import mock

from tests.distributed.launch_task import train as launch


def train(flags: list[str], ranks: int, port: int, variables: dict[str, str]) -> None:
    with mock.patch.dict(os.environ, variables):
        try:
            launch(flags, ranks, port)
        except SystemExit as end:  # at --exit-interval
            if end.code:
                raise
