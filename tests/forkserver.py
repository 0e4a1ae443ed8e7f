"""Processes without their imports: a server that has imported Megatron once forks them.

For tests that are about what a process does, not about how it starts: ``start`` is
``subprocess.Popen([sys.executable, "-m", *argv])`` for the price of a fork. With ``tree=True``
what the process starts by `subprocess` with the same interpreter's ``-m`` is forked, too: launcher,
torchrun and ranks become a real tree of processes. A process is the leader of a session of its own.

One server serves a whole session of pytest, its workers included, and ends with it. Everything in
it is on the CPU: a process that has talked to CUDA cannot be forked.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "MEGASINK_TEST_FORK_SERVER"
"""Holds the address of the session's server, for xdist's workers and for shell scripts."""
HANG_SECONDS = 600.0
"""No limit of a test is shorter: those of a busy machine are only there to end a hang."""
NUMBER = struct.Struct("!q")
"""Process ids, exit codes and sizes on the wire."""


class Process:
    """What is used of a `subprocess.Popen`, for a process that a server forked."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self.returncode: int | None = None
        self.pid = self._receive()
        assert self.pid > 1  # to be killed

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code (-N: signal N), or None if it is still there after so many seconds."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(seconds):
                    return None
            self.returncode = self._receive()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit code, or None if it is still there."""
        return self.wait(0)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _receive(self) -> int:
        data = self._connection.recv(NUMBER.size, socket.MSG_WAITALL)
        if len(data) < NUMBER.size:
            raise RuntimeError("the fork server has ended")
        return int(NUMBER.unpack(data)[0])


class FreshProcess(subprocess.Popen):  # type: ignore[type-arg]
    """The same for a real ``python -m ARGV``, in which nothing has been imported."""

    def __init__(self, argv: Sequence[str], **options: Any):
        super().__init__([sys.executable, "-W", "ignore", "-m", *argv], cwd=ROOT, **options)

    def wait(self, timeout: float | None = None) -> int | None:  # type: ignore[override]
        """The exit code, or None if it is still there after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return super().wait(timeout)
        return None


class ForkServer:
    """A client. It starts a server of its own, by a server that is there if it can.

    Args:
        address: of a server that is there, to use it and not to start one.
        imports: modules that its own server imports besides.
    """

    def __init__(self, address: str | None = None, imports: Sequence[str] = ()):
        self._imports = imports
        self._server: Process | subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if address is None:
            self._folder = tempfile.TemporaryDirectory(prefix="forks-")
            address = f"{self._folder.name}/socket"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen(64)
                self._server = self._start_server(listener)
        self.address = address

    def _start_server(self, listener: socket.socket) -> "Process | subprocess.Popen[bytes]":
        assert self._folder is not None
        argv, known = ["tests.forkserver_main", *self._imports], os.environ.get(VARIABLE)
        with Path(self._folder.name, "log").open("wb") as log:
            if known is not None:
                return ForkServer(known).start(argv, stdin=listener, stdout=log, stderr=log)
            return subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", *argv],
                env=_environment() | {"CUDA_VISIBLE_DEVICES": ""},
                cwd=ROOT,
                stdin=listener,
                stdout=log,
                stderr=log,
            )

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str = ROOT,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        tree: bool = False,
    ) -> Process:
        """Start ``python -m ARGV``.

        Args:
            env: its environment; None for ours.
            stdin, stdout, stderr: files, their numbers, or None for /dev/null; a Path is opened by
                the process itself, whose terminal it becomes if it is one.
            tree: its own ``python -m`` are forks of it. Only where it has no threads.
        """
        streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        request = {"argv": list(argv), "cwd": str(cwd), "tree": tree}
        request["env"] = dict(_environment() if env is None else env)
        request["paths"] = {n: str(f) for n, f in streams.items() if isinstance(f, Path)}
        data = json.dumps(request).encode()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        with open(os.devnull, "r+b") as null:  # noqa: PTH123
            files = [null if isinstance(f, Path | None) else f for f in streams.values()]
            numbers = [file if isinstance(file, int) else file.fileno() for file in files]
            socket.send_fds(connection, [NUMBER.pack(len(data))], numbers)
            connection.sendall(data)
            return Process(connection)

    def run(
        self, argv: Sequence[str], *, timeout: float = HANG_SECONDS, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """``subprocess.run([python, "-m", *argv], capture_output=True, text=True)``."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            process = self.start(argv, stdout=out, stderr=errors, **options)
            code = process.wait(timeout)
            texts = []
            for file in (out, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(list(argv), timeout, *texts)
            return subprocess.CompletedProcess(list(argv), code, *texts)

    def left(self) -> list[Any]:
        """What is still there of all that this server started (psutil.Process), also of what has
        lost its parent."""
        import psutil

        assert self._server is not None
        found = []
        for process in psutil.Process(self._server.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        """End the server, and with it what it has started."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        if self._folder is not None:
            self._folder.cleanup()


def server() -> ForkServer:
    """The session's, started where it is not there."""
    global _session
    if _session is None:
        _session = ForkServer(os.environ.get(VARIABLE))
        os.environ[VARIABLE] = _session.address
    return _session


_session: ForkServer | None = None


def put_megasink_into(folder: Path, module: str = "megasink") -> None:
    """Write a program ``megasink`` for shells, which is a fork of the session's server.

    ``megasink doctor`` starts anew: it is about what is there before a platform is chosen.

    Args:
        module: the program.
    """
    program = folder / "megasink"
    words = f'$([ "$1" = doctor ] || echo tests.forkserver) {module}'
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -W ignore -m {words} "$@"\n'
    )
    program.chmod(0o755)
    server()


def nested() -> ForkServer:
    """A server of its own, whose processes can be told apart: a fork of the session's."""
    server()
    return ForkServer()


def close() -> None:
    """End the session's server, if this process started it."""
    global _session
    if _session is not None:
        _session.close()
        _session = None
        os.environ.pop(VARIABLE, None)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":  # for shells: MODULE ARGUMENTS
    process = server().start(sys.argv[1:], cwd=Path.cwd(), stdin=0, stdout=1, stderr=2, tree=True)
    ended = process.wait() or 0
    sys.exit(ended if ended >= 0 else 128 - ended)
