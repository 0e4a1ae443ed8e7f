"""The worker pool, shared by every test of the session that needs ranks or the CPU platform."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two gloo workers; they start with the first task."""
    workers = Pool(2)
    yield workers
    workers.close()
