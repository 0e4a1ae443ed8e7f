"""Steps of an example: commands of megasink, each skipped where it is done."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from megasink.errors import Stopped, UserError


def command(*words: str, **options: Any) -> "subprocess.CompletedProcess[Any]":
    """Run a command of megasink in a process of its own.

    Args:
        options: of `subprocess.run`.

    Raises:
        UserError: It failed; it has said why.
    """
    ended = subprocess.run([sys.executable, "-m", "megasink", *words], check=False, **options)
    if ended.returncode < 0:
        raise Stopped(-ended.returncode, f" in `megasink {words[0]}`; repeat the command")
    if ended.returncode:
        raise UserError(f"stopped at `megasink {words[0]}`; repeat the command to go on there")
    return ended


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
