"""What all tests share: the pools of workers, the order and the tiers of tests."""

import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests import forkserver
from tests.distributed.pool import Pool
from tests.schedule import in_order, is_for_other_versions, scope, tiers
from tests.seeds import seed
from tests.versions import is_old

# Variables that say where things are on this machine, and those of the test runner.
KEPT = re.compile(
    "PATH|HOME|USER|LOGNAME|TMPDIR|LD_LIBRARY_PATH|LD_PRELOAD|CC|CXX|CUDA_.*|NVIDIA_.*|"
    "PIP_.*|SSL_CERT_.*|REQUESTS_CA_BUNDLE|.*_(proxy|PROXY)|VIRTUAL_ENV|PYTHONPATH|PYTEST_.*|"
    "OMP_NUM_THREADS|TRITON_INTERPRET|MEGASINK_TEST_.*"
)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """As in the workers and forks: sums of more threads differ in a bit, and the tensors of tests
    are small."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def checked_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's check of a command line takes seconds of imports in a process of its own."""

    def start(file: IO[str]) -> int | None:
        fork = forkserver.server().start(
            ["megasink.training.preflight"], stdin=file, cwd=Path.cwd()
        )
        return fork.wait()

    if job := sys.modules.get("megasink.training.preflight"):
        monkeypatch.setattr(job, "start", start)


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


def _skip_what_is_newer() -> Iterator[None]:
    """Skip a test of a model that an older transformers than the pinned one lacks."""
    try:
        return (yield)
    except Exception as error:
        lacks = r"transformers \S+ is too old for|module transformers has no attribute"
        lacks += "|does not recognize this architecture|has_previous_state|^'linear_attention'$"
        if re.search(lacks, str(error)) and is_old("transformers"):
            pytest.skip(str(error))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """For fixtures: `seed` and `_skip_what_is_newer`."""
    seed()
    return (yield from _skip_what_is_newer())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """For the test, whether or not it was the first to make its fixtures. One that fails leaves no
    process group, which the next could not make, and whose threads it would wait for."""
    seed()
    try:
        return (yield from _skip_what_is_newer())
    except Exception:
        distributed = sys.modules.get("torch.distributed")
        if distributed and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
        raise


def pytest_configure(config: pytest.Config) -> None:
    """Leave what else a shell exports out of all tests, such as a job's SLURM_NNODES, RUN_DIR or
    FORCE_COLOR. One fork server for all workers of xdist: it imports while they collect."""
    for name in set(os.environ):
        if not KEPT.fullmatch(name):
            del os.environ[name]
    os.environ["XDG_CACHE_HOME"] = str(forkserver.ROOT / "build" / "cache")  # not the user's
    os.umask(0o022)
    # Building its cache on a cold machine takes so long that it says so, in some test's output.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    if config.getoption("numprocesses", None) and not config.option.collectonly:
        forkserver.server()
        importlib.import_module("matplotlib.font_manager")  # writes the cache for all processes


def pytest_unconfigure() -> None:
    forkserver.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``: files, and some folders, as `scope` says."""
    from xdist.scheduler import LoadFileScheduling

    class ByScope(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    return ByScope(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = in_order(items)
    for item in items:
        if is_for_other_versions(item.nodeid):
            item.add_marker(pytest.mark.versions)
    for item, tier in tiers(items):
        item.add_marker(tier)
