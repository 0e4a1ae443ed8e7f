"""Start the processes of a run: forked where that is possible, launched elsewhere.

The start of `megasink train` takes about 17 s of CPU time, nearly all of it for imports. A single
rank on the CPU is therefore forked from a process that has imported everything (`preload.py`), and
so are the measurements of its run. A process that has used CUDA cannot be forked, and several ranks
need a launcher: such a run is a ``megasink train`` of its own.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from examples.replicate.grid import preload, tied
from examples.replicate.grid.child import Task, become

_ROOT = Path(__file__).parents[3]


class Started(Protocol):
    """A process and all that it has started."""

    @property
    def pid(self) -> int | None:
        """Its process id."""

    def poll(self) -> int | None:
        """Return its exit code (-N: signal N), or None if it is running."""

    def kill(self) -> None:
        """Kill it with all that it has started."""


@dataclass(frozen=True)
class Way:
    """How the processes of a run are started.

    Attributes:
        name: "fork" or "launch".
        why: the reason, after "because".
    """

    name: str
    why: str

    def train(self, flags: Sequence[str], ranks: int, logs: Path, threads: int) -> Started:
        """Start the training of a run; it resumes if there is something to resume from."""
        flags = [*flags, "--resume", "auto"]
        if self.name == "fork":
            return Forked(Task(flags, True, logs, threads))
        return Launched(["train", "--ranks", str(ranks), *flags], logs)

    def measure(self, words: Sequence[str], logs: Path, threads: int) -> Started:
        """Start a command of megasink."""
        if self.name == "fork":
            return Forked(Task(words, False, logs, threads))
        return Launched(words, logs)


def way_of(args: Namespace, ranks: int) -> Way:
    """Choose how to start a run.

    Args:
        args: of `megasink.training.preflight.check`.
    """
    if args.device != "cpu":
        return Way("launch", "it may use GPUs (cpu is not set)")
    if ranks > 1:
        return Way("launch", f"it has {ranks} ranks")
    return Way("fork", "it is one rank on the CPU")


class Forked:
    """A child of the fork server."""

    def __init__(self, task: Task):
        task.logs.mkdir(parents=True, exist_ok=True)
        self._process = fork_server().Process(target=become, args=(task,))
        self._process.start()

    @property
    def pid(self) -> int | None:
        pid: int | None = self._process.pid
        return pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def kill(self) -> None:
        _kill(self)


class Launched:
    """A command of megasink in an interpreter of its own, which ends with this process."""

    def __init__(self, words: Sequence[str], logs: Path):
        logs.mkdir(parents=True, exist_ok=True)
        # By its path: the working directory need not be that of the repository.
        command = [sys.executable, "-P", tied.__file__, str(os.getpid()), *words]
        with (logs / "stdout.log").open("a") as out, (logs / "stderr.log").open("a") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        _kill(self)


def tell(started: Started, number: int) -> None:
    """Send a signal, unless the process has ended."""
    if started.poll() is None and started.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(started.pid, number)


def cpu_seconds(started: Started) -> float:
    """Return the CPU time so far of a process and all that it has started; 0 once it has ended."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(started.pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


def _kill(started: Started) -> None:
    left: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        left = psutil.Process(started.pid).children(recursive=True)
    tell(started, signal.SIGKILL)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()


def fork_server() -> Any:
    """Return the context whose processes are forks of one that has imported everything.

    The server ends with this process, however that ends; a fork that has called
    `megasink.training.watchdog.guard.start` ends with the server.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload.__name__])
    # The server keeps the environment that it starts with: without GPUs. What it preloads it finds
    # on PYTHONPATH alone: multiprocessing gives it no sys.path.
    found = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": found,
        preload.GRID: str(os.getpid()),
    }
    with _environment(environment):
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
