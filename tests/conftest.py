"""The worker pool, shared by every test of the session that needs ranks or the CPU platform."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.coverage import table
from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two gloo workers; they start with the first task."""
    workers = Pool(2)
    yield workers
    workers.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The layouts in which tests/distributed/test_invariance.py compared the balance loss."""
    compared = [
        value
        for report in terminalreporter.stats.get("passed", [])
        for name, value in report.user_properties
        if name == "compared"
    ]
    if compared:
        terminalreporter.section("layouts compared with one process")
        for row in table(compared):
            terminalreporter.write_line(row)
