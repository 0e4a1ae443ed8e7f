"""torchrun and the ranks that it started: told to end by what tells us, and gone when we are."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from megasink.train.stop import SIGNALS, name_of

# What ranks that are told to end have for the step that they are in and a checkpoint.
SAVE_SECONDS = 600.0


class Ranks:
    """A context: the processes run inside it, and none of them does after it.

    They are no part of our terminal's process group. Its Ctrl-C comes to us alone, and we tell the
    ranks: torchrun, told twice, would leave them behind, and told once it may not notice.

    Args:
        arguments: of torchrun.
        logs: folder for its output, and for ours when the terminal is closed.
        console: where it is said that the ranks were told to end.

    Attributes:
        told: the signals that we got, in order.
    """

    def __init__(self, arguments: Sequence[str], logs: Path, console: Console):
        self._arguments, self._logs, self._console = arguments, logs, console
        self.told: list[int] = []
        self._asked: set[int] = set()
        self._since: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Ranks":
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self._hear)
        command = [sys.executable, "-m", "megasink.train.agent", str(os.getpid())]
        environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{SAVE_SECONDS:.0f}"} | os.environ
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
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def poll(self) -> int | None:
        """torchrun's exit code, or None; and hand on what we were told. Called often."""
        code = self._torchrun.poll()
        if code is None and self.told:
            self._hand_on()
        return code

    @property
    def pressed_again(self) -> bool:
        """Whether Ctrl-C came a second time: schedulers may repeat the other signals."""
        return self.told.count(signal.SIGINT) > 1

    def closed_terminal(self) -> None:
        """Nobody reads what we write: as SIGHUP, which may come later or not at all."""
        self.told.append(signal.SIGHUP)
        self._write_to_log()

    def _hear(self, number: int, frame: Any) -> None:
        self.told.append(number)

    def _hand_on(self) -> None:
        if self._since is None:
            self._since = time.monotonic()
            again = "; Ctrl-C again ends them at once" if self.told[0] == signal.SIGINT else ""
            self._say(f"{name_of(self.told[0])}: the ranks finish the step and save{again}")
            if self.told[0] == signal.SIGHUP and self._console.is_terminal:
                self._write_to_log()
        waited = time.monotonic() - self._since
        if self.pressed_again or waited > SAVE_SECONDS:
            self._kill()
            return
        ranks = list(self._started())
        for rank in ranks:
            if rank.pid not in self._asked:
                self._asked.add(rank.pid)
                with contextlib.suppress(psutil.Error):
                    rank.send_signal(self.told[0])
        if ranks:
            return
        # torchrun is about to start them, or has ended with them.
        if self._torchrun.pid not in self._asked:
            self._asked.add(self._torchrun.pid)
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
        """End what is left, whatever it is doing; helpers of ranks end with them."""
        left: Iterable[psutil.Process] = ()
        with contextlib.suppress(psutil.Error):
            left = psutil.Process(self._torchrun.pid).children(recursive=True)
        if self._torchrun.poll() is None:
            self._torchrun.kill()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _write_to_log(self) -> None:
        """The terminal is gone: what we have to say is in the folder of the logs."""
        with (self._logs / "launcher.log").open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    def _say(self, text: str) -> None:
        try:
            self._console.print(text, highlight=False, soft_wrap=True)
        except OSError:
            self._write_to_log()
