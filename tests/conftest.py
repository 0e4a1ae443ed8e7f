"""What all tests share: the pools of workers, the order of the files, the quick slice."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests import forkserver
from tests.distributed.coverage import table
from tests.distributed.pool import Pool
from tests.schedule import in_order, is_for_next_release, is_quick, later


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """As in the workers and forks: sums of more threads differ in a bit, and the tensors of tests
    are small."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two gloo workers; they start with the first task."""
    with Pool(2) as workers:
        yield workers


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    """Four of them, for the few layouts that need as many."""
    with Pool(4) as workers:
        yield workers


def pytest_configure(config: pytest.Config) -> None:
    """One fork server for all workers of xdist: it imports while they collect."""
    if config.getoption("numprocesses", None) and not config.option.collectonly:
        forkserver.server()


def pytest_unconfigure() -> None:
    forkserver.close()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = in_order(items)
    for item in items:
        if is_quick(item.nodeid):
            item.add_marker(pytest.mark.quick)
        if is_for_next_release(item.nodeid):
            item.add_marker(pytest.mark.next_release)
    for item in later(items):
        item.add_marker(pytest.mark.later)


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
