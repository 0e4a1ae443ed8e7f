"""A plugin of pytest: tests of one kernel, without those that passed in an earlier call.

    python -m pytest -p tests.gpu.parts --kernel cudnn --passed FILE --running FILE tests/gpu/...

Lets benchmarks/gpu.py stop a part at any time and continue it in the next call. A test that breaks
the device, hangs or ends the process leaves its name in the file --running: the caller adds it to
FILE.lost and starts the rest again.
"""

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.seeds import seed

_STDERR = os.dup(2)  # what tests write is captured


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel", help="tests of this kernel; none for tests of no kernel")
    parser.addoption("--passed", type=Path, help="names of tests that passed; more are added")
    parser.addoption("--running", type=Path, help="the name of the test that runs")
    parser.addoption("--hang", type=float, help="seconds after which a test ends the process")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device (tests/gpu)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kernel, passed = config.getoption("--kernel"), config.getoption("--passed")
    before, lost = _names(passed), _names(_lost(config))
    wanted = [
        item
        for item in items
        if item.nodeid not in before | lost and kernel in (None, _kernel_of(item))
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted
    if before:
        print(f"{len(before)} tests passed before")


def _lost(config: pytest.Config) -> Path | None:
    running = config.getoption("--running")
    return running and Path(f"{running}.lost")


def _names(path: Path | None) -> set[str]:
    return set(path.read_text().splitlines()) if path and path.exists() else set()


def _kernel_of(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    return call.params.get("kernel", "none") if call else "none"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed()
    if running := item.config.getoption("--running"):
        running.write_text(f"{item.nodeid}\n")
    if hang := item.config.getoption("--hang"):
        faulthandler.dump_traceback_later(hang, exit=True, file=_STDERR)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    passed = item.config.getoption("--passed")
    if passed and report.when == "call" and report.passed:
        with passed.open("a") as file:
            file.write(f"{item.nodeid}\n")
    if report.failed and not item.session.shouldstop and not device_works():
        item.session.shouldstop = f"{item.nodeid} broke the device for this process"
    return report


def device_works() -> bool:
    """Return False after an error from which CUDA does not recover in the same process."""
    torch = sys.modules.get("torch")
    try:
        if torch and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End with exit code 0 if nothing is left to collect, because all tests passed before."""
    running = session.config.getoption("--running")
    if running and not session.shouldstop:
        running.unlink(missing_ok=True)
    if lost := _names(_lost(session.config)):
        print(f"\nended the process or broke the device: {', '.join(sorted(lost))}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
