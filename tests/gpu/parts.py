"""A plugin of pytest: tests of one kernel, without those that passed in an earlier call.

    python -m pytest -p tests.gpu.parts --kernel cudnn --passed FILE tests/gpu/...

Lets benchmarks/gpu.py stop a part at any time and continue it in the next call.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.seeds import seed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel", help="tests of this kernel; none for tests of no kernel")
    parser.addoption("--passed", type=Path, help="names of tests that passed; more are added")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device (tests/gpu)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kernel, passed = config.getoption("--kernel"), config.getoption("--passed")
    before = set(passed.read_text().splitlines()) if passed and passed.exists() else set()
    wanted = [
        item for item in items if item.nodeid not in before and kernel in (None, _kernel_of(item))
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted
    if before:
        print(f"{len(before)} tests passed before")


def _kernel_of(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    return call.params.get("kernel", "none") if call else "none"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    seed()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    passed = item.config.getoption("--passed")
    if passed and report.when == "call" and report.passed:
        with passed.open("a") as file:
            file.write(f"{item.nodeid}\n")
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End with exit code 0 if nothing is left to collect, because all tests passed before."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
