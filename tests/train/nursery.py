"""Real trees of processes (launcher, torchrun, ranks) without importing Megatron in each of them.

Usage: python -m tests.train.nursery. It imports once what they all need. For every line {"argv",
"environment", "stdout", "stderr"} on standard input it forks a process, the leader of a session
of its own, that runs ``python -m ARGV``, and writes its process id, and when it has ended its exit
code (-N: signal N). What that process starts by `subprocess` with the same interpreter's ``-m`` is
forked, too; everything else is as it always is. What is left without a parent becomes its child.
"""

import contextlib
import ctypes
import json
import os
import queue
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
_real = subprocess.Popen


class Forked:
    """What is used of a `subprocess.Popen`, for a child that is a fork."""

    def __init__(self, command: list[str], options: dict[str, Any]):
        self.args, self.returncode = command, None
        self.pid = os.fork()
        if self.pid == 0:
            become(command[command.index("-m") + 1 :], **options)

    def poll(self) -> int | None:
        if self.returncode is None:
            self._reap(os.WNOHANG)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.05)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, flags: int) -> None:
        pid, status = os.waitpid(self.pid, flags)
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)


class Popen(_real):  # type: ignore[type-arg]
    """Forks where the command is a module of this interpreter."""

    def __new__(cls, args: Any, **options: Any) -> Any:
        if isinstance(args, list | tuple) and args[0] == sys.executable and "-m" in args:
            return Forked(list(args), options)
        return super().__new__(cls)


def become(
    argv: list[str],
    env: dict[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    start_new_session: bool = False,
    **others: Any,
) -> None:
    """Turn this process, just forked, into another one, as far as that can be; does not return."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if start_new_session:
        os.setsid()
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for file, number in ((stdout, 1), (stderr, 2)):
        if file is not None:
            os.dup2(file if isinstance(file, int) else file.fileno(), number)
    # Not closed: objects of the parent that are deleted here would close what has their number.
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            if number > 2:
                os.dup2(null, number)
    warnings.simplefilter("ignore")
    subprocess.Popen = Popen  # type: ignore[misc]
    handler = sys.modules["torch.distributed.elastic.multiprocessing.subprocess_handler"]
    handler.subprocess_handler.Popen = Popen
    sys.argv = list(argv)
    code = 1
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        end_as_python_does(code)


def end_as_python_does(code: int) -> None:
    import atexit

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class Nursery:
    """The client: starts the server, and one process after another in it."""

    def __init__(self) -> None:
        self._server = _real(
            [sys.executable, "-W", "ignore", "-m", "tests.train.nursery"],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answers: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, argv: list[str], stdout: str, stderr: str, **environment: str) -> int:
        """Start ``python -m ARGV``, with the paths of files or of a terminal. Its process id."""
        request = {"argv": argv, "environment": environment, "stdout": stdout, "stderr": stderr}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        pid = self._answer(300)
        assert pid is not None, "the nursery did not start"
        assert pid > 1  # to be killed
        return pid

    def wait(self, seconds: float) -> int | None:
        """The exit code of what was started last, or None if it is still there after that long."""
        return self._answer(seconds)

    def left(self) -> list[psutil.Process]:
        """What is still there of all that was started."""
        found = []
        for process in psutil.Process(self._server.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _read(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            self._answers.put(int(line))
        self._answers.put(None)

    def _answer(self, seconds: float) -> int | None:
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=seconds)
        return None

    def close(self) -> None:
        self._server.kill()
        self._server.wait()


def serve() -> None:
    system = ctypes.CDLL(None)
    system.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    system.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Megatron prints while it is imported
    from megasink.process import prepare_process

    prepare_process([])
    import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler
    import torch.distributed.run  # noqa: F401

    from megasink.checkpoint import model  # noqa: F401
    from megasink.train import (  # noqa: F401
        arguments,
        checkpoint_writer,
        forward,
        launch,
        observer,
        pretrain,
    )

    while line := sys.stdin.readline():
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            system.prctl(1, signal.SIGKILL)
            os.setsid()
            # A terminal that the leader of a session opens is that of the session.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            files = [os.open(request[name], flags, 0o644) for name in ("stdout", "stderr")]
            become(request["argv"], {**os.environ, **request["environment"]}, *files)
        while os.getsid(child) != child:  # so that it can be told by its group
            time.sleep(0.001)
        print(child, file=answers, flush=True)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    serve()
