"""Run torchrun and its ranks: forward our signals to them, and leave none behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from megasink.console.signals import handling, name_of
from megasink.training.stop import FAILURES, SIGNALS

# Time for signaled ranks to finish the current step and save a checkpoint.
SAVE_SECONDS = 600.0


class Ranks:
    """Context manager for torchrun and its ranks, in sessions of their own; all end when it exits.

    Ctrl-C reaches only the launcher, which signals the ranks: torchrun would leave them behind
    after two signals. `signals` has those that we received.
    """

    def __init__(
        self, arguments: Sequence[str], logs: Path, console: Console, variables: Mapping[str, str]
    ):
        self._arguments, self._logs, self._console = arguments, logs, console
        self._variables = variables
        self.signals: list[int] = []
        self._signaled: set[int] = set()
        self._since: float | None = None
        self._handling = handling(self._hear, SIGNALS)

    def __enter__(self) -> "Ranks":
        self._handling.__enter__()
        command = [sys.executable, "-m", "megasink.training.torchrun_agent", str(os.getpid())]
        command.append(str(self._logs / FAILURES))
        environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{SAVE_SECONDS:.0f}", **os.environ}
        environment |= self._variables
        with (self._logs / "torchrun.log").open("w") as log:
            self._torchrun = subprocess.Popen(
                [*command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        self._torchrun.wait()
        self._handling.__exit__(None, None, None)

    def poll(self) -> int | None:
        """Forward our signals, and return torchrun's exit code or None. Call often."""
        code = self._torchrun.poll()
        if code is None and self.signals:
            self._hand_on()
        return code

    @property
    def pressed_again(self) -> bool:
        """Whether Ctrl-C was pressed twice: schedulers may repeat the other signals."""
        return self.signals.count(signal.SIGINT) > 1

    def closed_terminal(self) -> None:
        """Treat a closed terminal as SIGHUP, which may come later or not at all."""
        self.signals.append(signal.SIGHUP)
        self._write_to_log()

    def _hear(self, number: int, frame: Any) -> None:
        self.signals.append(number)

    def _hand_on(self) -> None:
        if self._since is None:
            self._since = time.monotonic()
            again = (
                "; press Ctrl-C again to end them now" if self.signals[0] == signal.SIGINT else ""
            )
            self._say(f"{name_of(self.signals[0])}: the ranks will finish the step and save{again}")
            if self.signals[0] == signal.SIGHUP and self._console.is_terminal:
                self._write_to_log()
        waited = time.monotonic() - self._since
        if self.pressed_again or waited > SAVE_SECONDS:
            self._kill()
            return
        ranks = list(self._started())
        for rank in ranks:
            if rank.pid not in self._signaled:
                self._signaled.add(rank.pid)
                with contextlib.suppress(psutil.Error):
                    rank.send_signal(self.signals[0])
        if ranks:
            return
        # torchrun is about to start the ranks, or has ended with them.
        if self._torchrun.pid not in self._signaled:
            self._signaled.add(self._torchrun.pid)
            self._torchrun.terminate()
        elif waited > 10:
            self._torchrun.kill()

    def _started(self) -> Iterator[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._torchrun.pid).children():
                # torchrun makes every rank the leader of a session.
                with contextlib.suppress(ProcessLookupError):
                    if os.getsid(child.pid) == child.pid:
                        yield child

    def _kill(self) -> None:
        """Kill all remaining processes, including the ranks' helpers."""
        left: Iterable[psutil.Process] = ()
        with contextlib.suppress(psutil.Error):
            left = psutil.Process(self._torchrun.pid).children(recursive=True)
        if self._torchrun.poll() is None:
            self._torchrun.kill()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _write_to_log(self) -> None:
        """Redirect our output to the log folder: the terminal is gone."""
        with (self._logs / "launcher.log").open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    def _say(self, text: str) -> None:
        try:
            self._console.print(text, highlight=False, soft_wrap=True)
        except OSError:
            self._write_to_log()
