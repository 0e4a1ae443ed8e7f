"""``python -m tests.forkserver_main``: forks what the clients of tests/forkserver.py ask for.

It listens on the socket that is its standard input, until it is killed or its parent ends.
"""

import contextlib
import ctypes
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from examples.replicate.grid import preload
from examples.replicate.grid.child import end_as_python_does
from tests.forkserver import HANG_SECONDS, NUMBER

_SUBREAPER, _DEATH_SIGNAL = 36, 1  # of prctl
_real = subprocess.Popen


class Forked:
    """What is used of a `subprocess.Popen`, for a child of this process that is a fork."""

    def __init__(self, command: list[str], options: dict[str, Any]):
        self.args, self.returncode = command, None
        self.pid = os.fork()
        if self.pid == 0:
            become(_program(command), **options)

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[None, None]:
        self.wait(timeout)
        return None, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
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


def _program(command: Any) -> list[str]:
    """The module or script of a command of this interpreter, and its arguments; [] for others."""
    if not isinstance(command, list | tuple) or command[0] != sys.executable:
        return []
    if "-m" in command:
        return list(command[command.index("-m") + 1 :])
    words = [word for word in command[1:] if word != "-u"]
    return words if words and "/" in words[0] else []


class Popen(_real):  # type: ignore[type-arg]
    """Forks where the command is a program of this interpreter, whose output nobody reads."""

    def __new__(cls, args: Any, **options: Any) -> Any:
        if _program(args) and subprocess.PIPE not in options.values():
            return Forked(list(args), options)
        return super().__new__(cls)


def become(
    argv: list[str],
    env: dict[str, str] | None = None,
    stdin: Any = None,
    stdout: Any = None,
    stderr: Any = None,
    start_new_session: bool = False,
    cwd: str | None = None,
    tree: bool = True,
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
    if cwd is not None:
        os.chdir(cwd)
    null = os.open(os.devnull, os.O_RDWR)
    for number, file in enumerate((null if stdin is None else stdin, stdout, stderr)):
        if file is not None and file != subprocess.DEVNULL:
            os.dup2(file if isinstance(file, int) else file.fileno(), number)
        elif file is not None:
            os.dup2(null, number)
    # Not closed: objects of the parent that are deleted here would close what has their number.
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            if number > 2:
                os.dup2(null, number)
    warnings.simplefilter("ignore")
    if tree:
        subprocess.Popen = Popen  # type: ignore[misc]
        handler = sys.modules["torch.distributed.elastic.multiprocessing.subprocess_handler"]
        handler.subprocess_handler.Popen = Popen
    sys.argv = list(argv)
    code = 1
    try:
        if "/" in argv[0]:
            runpy.run_path(argv[0], run_name="__main__")
        else:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        end_as_python_does(code)


def serve(listener: socket.socket) -> None:
    """Fork what clients ask for, until this process is killed."""
    system = ctypes.CDLL(None)
    system.prctl(_SUBREAPER, 1)
    system.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    _import_everything()
    clients: dict[int, socket.socket] = {}  # by the process that was started for it
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(1 << 16)
                elif key.fileobj is listener:
                    connection, _ = listener.accept()
                    pid = _fork(connection, system)
                    clients[pid] = connection
                    selector.register(connection, selectors.EVENT_READ, pid)
                else:  # a client has nothing more to say: it has ended
                    selector.unregister(key.fileobj)
                    with contextlib.suppress(ProcessLookupError):
                        if key.data in clients:
                            os.killpg(key.data, signal.SIGKILL)
            for pid, code in _ended():
                if connection := clients.pop(pid, None):  # type: ignore[assignment]
                    with contextlib.suppress(KeyError):
                        selector.unregister(connection)
                    with contextlib.suppress(OSError), connection:
                        connection.sendall(NUMBER.pack(code))


def _fork(connection: socket.socket, system: ctypes.CDLL) -> int:
    header, files, _, _ = socket.recv_fds(connection, NUMBER.size, 3)
    (size,) = NUMBER.unpack(header)
    request = json.loads(connection.recv(size, socket.MSG_WAITALL))
    child = os.fork()
    if child == 0:
        system.prctl(_DEATH_SIGNAL, signal.SIGKILL)
        os.setsid()
        streams = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
        for name, path in request.pop("paths").items():
            streams[name] = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        become(**request, **streams)
    for file in files:
        os.close(file)
    while os.getsid(child) != child:  # so that it can be told by its group
        time.sleep(0.001)
    connection.sendall(NUMBER.pack(child))
    return child


def _ended() -> list[tuple[int, int]]:
    found = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def _import_everything() -> None:
    """All of the package, and what upstream and it import when they are called."""
    import gc
    import importlib
    import pkgutil

    import megasink
    from megasink.cpu.prepare_process import prepare_process
    from megasink.megatron.argument_parser import parse_apart

    prepare_process()
    found = pkgutil.walk_packages(megasink.__path__, "megasink.")
    for name in [module.name for module in found if not module.name.endswith("__main__")]:
        importlib.import_module(name)
    for name in (*LATE, *sys.argv[1:]):
        importlib.import_module(name)
    parse_apart([])
    _shrink_mock_data()
    _be_patient()
    gc.collect()
    gc.freeze()


LATE = (
    *preload.LATE,
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
    "torch.distributed.run",
)


def _shrink_mock_data() -> None:
    """Two million tokens, not two hundred: shuffling the indices of all the samples would be a
    third of what a short run computes."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 1000


def _be_patient() -> None:
    """Lengthen the limits that a machine with many other things to do would meet."""
    from megasink.analysis import ranks
    from megasink.console import signals
    from megasink.training import compare_hosts, multi_host_torchrun, stop
    from megasink.training.watchdog import guard

    stop.STEP_SECONDS = signals._SECONDS = compare_hosts._LARGE_SECONDS = HANG_SECONDS / 2
    guard.end_seconds = HANG_SECONDS / 2
    ranks._GRACE_SECONDS = multi_host_torchrun._SECONDS = HANG_SECONDS / 10


if __name__ == "__main__":
    serve(socket.socket(fileno=os.dup(0)))
