"""The worker pool, shared by every test of the session that needs ranks or the CPU platform."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.coverage import table
from tests.distributed.pool import Pool

# Files that take longest go first: with --dist loadfile the workers then end together.
_LONG = """
    test_readme.py
    train/test_end_to_end.py train/test_dead_rank.py train/test_survival.py
    train/test_live_analysis.py train/test_sink_token.py train/test_observing.py
    distributed/test_resume.py distributed/test_data_path.py distributed/test_features.py
    distributed/test_gates.py distributed/test_moe.py distributed/test_invariance.py
    inference/test_decoding.py balance/test_communication.py platform/test_patches.py
    probe/test_resuming.py probe/test_cli.py probe/test_sweep.py
    convert/test_round_trip.py convert/test_own_model.py convert/test_commands.py
""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    place = {root / name: index for index, name in enumerate(_LONG)}
    items.sort(key=lambda item: place.get(item.path, len(_LONG)))


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
