"""Steps of an example: commands of megasink, each skipped where it is done."""

import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from megasink.errors import Stopped, UserError

_SECONDS = 4.0
"""Until a command that is to end has ended; `console/signals.py` gives the whole process ten."""


def command(*words: str, **options: Any) -> "subprocess.CompletedProcess[Any]":
    """Run a command of megasink in a process of its own.

    Args:
        options: of `subprocess.run`.

    Raises:
        UserError: It failed; it has said why.
    """
    process = subprocess.Popen([sys.executable, "-m", "megasink", *words], **options)
    try:
        out, _ = process.communicate()
    except KeyboardInterrupt as signalled:
        _wait_for(process, getattr(signalled, "number", signal.SIGINT))
        raise
    ended = subprocess.CompletedProcess(words, process.returncode, out)
    if ended.returncode < 0:
        raise Stopped(-ended.returncode, f" in `megasink {words[0]}`; repeat the command")
    if ended.returncode:
        raise UserError(f"stopped at `megasink {words[0]}`; repeat the command to go on there")
    return ended


def _wait_for(process: "subprocess.Popen[Any]", number: int) -> None:
    """Let a command unwind behind a signal; `subprocess.run` would kill it after 0.25 s.

    Ctrl-C in a terminal has reached it; other signals, and one of `kill`, have not.
    """
    for seconds in (_SECONDS if number == signal.SIGINT else 0, _SECONDS):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()


@dataclass(frozen=True)
class Step:
    """A command of megasink.

    Attributes:
        what: A heading.
        command: Its words.
        done: Whether it has finished.
        makes: A folder that is deleted before it starts again, since the command refuses
            what an interrupted one has left; None if it resumes by itself.
    """

    what: str
    command: Sequence[str | Path | int]
    done: Callable[[], bool]
    makes: Path | None = None

    def run(self, console: Console) -> None:
        """Run the command in a process of its own, unless it is done.

        Raises:
            UserError: It failed; it has said why.
        """
        words = [str(word) for word in self.command]
        if self.done():
            console.print(f"[bold]{self.what}[/bold]: done before")
            return
        console.print(
            f"[bold]{self.what}[/bold]: megasink {escape(shlex.join(words))}", soft_wrap=True
        )
        if self.makes is not None and self.makes.exists():
            shutil.rmtree(self.makes)
        # A process each: one that has become a Megatron rank cannot become another.
        command(*words)
