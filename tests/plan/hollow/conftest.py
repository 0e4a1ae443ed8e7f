"""The server of the hollow GPU: a process that has imported everything, and forks for tests."""

from collections.abc import Iterator

import pytest

from megasink.plan import hollow
from tests.plan.hollow.client import Server


@pytest.fixture(scope="session")
def gpu() -> Iterator[Server]:
    """Runs a task in a process of its own on the hollow GPU."""
    if reason := hollow.missing():
        pytest.skip(reason)
    with Server() as server:
        yield server
