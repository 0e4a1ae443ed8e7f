"""A pool of gloo workers that outlives the tests, because importing megatron takes seconds.

Each worker is a fork of the session's server (``tests/forkserver.py``) that runs
``tests/distributed/worker.py``. A task is a function named "module:function"; for every task the
workers make the process group and Megatron's parallel state anew, in the layout that the task asks
for. Workers beyond the size of the layout stay idle.
"""

import contextlib
import os
import pickle
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from tests.distributed.layout import Layout
from tests.forkserver import HANG_SECONDS, ROOT, FreshProcess, Process, server

__all__ = ["ROOT", "Pool", "TaskFailed", "free_port"]

# How long the other ranks may take to answer after one of them failed: they may be stuck in a
# collective with it, or meet the same error later on a busy machine.
GRACE_SECONDS = HANG_SECONDS / 2
_names: list[socket.socket] = []


def free_port() -> int:
    """A port that no other test gets, also one of another pytest on this machine.

    It is none that the system gives to outgoing connections. Until whoever asked for it listens
    there, a name like it in the same network namespace is taken by this process.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    free = [port for port in range(10_000, 65_536) if not first <= port <= last]
    while True:
        port = secrets.choice(free or range(10_000, 65_536))
        name = socket.socket(socket.AF_UNIX)
        with socket.socket() as sock, contextlib.suppress(OSError):
            name.bind(f"\0megasink-test-port-{port}")
            sock.bind(("127.0.0.1", port))
            _names.append(name)
            return port
        name.close()


class TaskFailed(Exception):
    """A task raised, crashed or hung in a worker; the message holds what the worker said."""


class Pool:
    """Workers that run tasks together; started by the first task, and again after a failed one.

    Args:
        size: the number of workers, the largest layout that fits.
        fresh: not forks but processes in which nothing has been imported.
    """

    def __init__(self, size: int = 2, *, fresh: bool = False):
        self.size, self._fresh = size, fresh
        self.starts = 0
        self._temporary = tempfile.TemporaryDirectory(prefix="pool-", ignore_cleanup_errors=True)
        self._folder = Path(self._temporary.name)
        self._processes: list[Process | FreshProcess] = []
        self._connections: list[Connection] = []
        self._tasks = 0
        self._known: dict[str, list[Any]] = {}

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self,
        task: str,
        layout: Layout | None = None,
        timeout: float = HANG_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``task(**kwargs)`` on every rank of the layout.

        Args:
            task: "package.module:function".
            layout: None for the bare function on every worker, without a process group.
            timeout: seconds until all ranks must have answered. The default is for hangs alone, on
                a busy machine too.

        Returns:
            what the function returned, by rank.

        Raises:
            TaskFailed: with the traceback of the first rank that failed.
        """
        world = self.size if layout is None else layout.world
        if world > self.size:
            raise ValueError(f"layout {layout} needs {world} workers, the pool has {self.size}")
        self._start()
        self._tasks += 1
        store = self._folder / f"store-{self._tasks}"
        message = pickle.dumps((task, layout, str(store), kwargs))
        for connection in self._connections[:world]:
            connection.send_bytes(message)
        return self._collect(task, world, time.monotonic() + timeout)

    def once(self, task: str, layout: Layout | None = None, **kwargs: Any) -> list[Any]:
        """What :meth:`run` returned when it was asked for the same the first time."""
        key = f"{task} {layout} {sorted(kwargs.items())}"
        if key not in self._known:
            self._known[key] = self.run(task, layout, **kwargs)
        return self._known[key]

    def train(self, flags: Sequence[str], ranks: int = 1, *, gpt: bool = False) -> None:
        """Run the trainer to its end in so many workers; `gpt` with a GPTModel."""
        task = f"tests.distributed.{'gpt_model' if gpt else 'launch_task'}:train"
        self.run(task, flags=list(flags), ranks=ranks, port=free_port())

    def close(self) -> None:
        """End the workers: by asking, then by force."""
        for connection in self._connections:
            connection.close()  # a worker whose connection is closed ends by itself
        for process in self._processes:
            if process.wait(5) is None:
                process.kill()
                process.wait()
        self._processes, self._connections = [], []

    def _collect(self, task: str, world: int, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < world:
            waiting = [
                c
                for rank, c in enumerate(self._connections[:world])
                if rank not in results and rank not in failures
            ]
            left = deadline - time.monotonic()
            ready = wait(waiting, max(0.0, left))
            if not ready:
                break
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    good, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    # The process closed the connection by dying: only its log can tell why.
                    code = self._processes[rank].wait()
                    good = False
                    value = f"the worker ended with exit code {code}\n{self._log(rank)}"
                if good:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not failures and len(results) == world:
            return [results[rank] for rank in range(world)]
        silent = [r for r in range(world) if r not in results and r not in failures]
        text = [f"{task} failed on {len(failures)} of {world} ranks"]
        text += [f"--- rank {rank}:\n{value}" for rank, value in failures.items()]
        if silent:
            text += [f"--- rank {r} did not answer:\n{self._where(r)}" for r in silent]
        # What a task that failed has left, such as process groups, is not for the next one.
        self._kill()
        raise TaskFailed("\n".join(text))

    def _start(self) -> None:
        if self._processes:
            return
        self.starts += 1
        key = secrets.token_bytes(16)
        address = str(self._folder / f"socket-{self.starts}")
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",  # results that do not depend on the machine's load
            "CUDA_VISIBLE_DEVICES": "",
            "POOL_KEY": key.hex(),
        }
        with Listener(address, authkey=key) as listener:
            for rank in range(self.size):
                with self._log_path(rank).open("wb") as log:
                    argv = ["tests.distributed.worker", address]
                    start = FreshProcess if self._fresh else server().start
                    process = start(argv, env=environment, stdout=log, stderr=log)
                self._processes.append(process)
                # One after the other, so that the order of the connections is that of the ranks.
                self._connections.append(self._accept(listener, rank))
        for rank, connection in enumerate(self._connections):
            connection.send_bytes(pickle.dumps(rank))

    def _accept(self, listener: Listener, rank: int) -> Connection:
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        deadline = time.monotonic() + HANG_SECONDS
        while self._processes[rank].poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                return listener.accept()
        log = self._log(rank)
        self._kill()
        raise TaskFailed(f"worker {rank} did not start:\n{log}")

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()

    def _where(self, rank: int) -> str:
        """The stack of a worker that hangs, which faulthandler writes into its log."""
        deadline, log = time.monotonic() + HANG_SECONDS / 10, self._log_path(rank)
        for number in (1, 2):  # the first is whole when the second begins
            self._processes[rank].send_signal(signal.SIGUSR1)
            while time.monotonic() < deadline and log.read_bytes().count(b"Current thr") < number:
                time.sleep(0.01)
        return self._log(rank)

    def _log_path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    def _log(self, rank: int) -> str:
        return "\n".join(self._log_path(rank).read_text(errors="replace").splitlines()[-60:])
