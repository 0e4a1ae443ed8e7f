"""How far an analysis is: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LOG_SECONDS = 30.0


@contextmanager
def progress(
    total: int, before: int, console: Console, what: str = "analyzing"
) -> Iterator[Callable[[int], None]]:
    """Show the samples that are done and the time that is left.

    Args:
        total: samples in all.
        before: those that an earlier process has done, of which nobody knows how long they took.

    Yields:
        what is to be called with the number of samples that are done, those before included.
    """
    if console.is_terminal:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total, completed=before)
            yield lambda done: bar.update(task, completed=done)
        return
    start = last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > _LOG_SECONDS and before < done < total:
            last = now
            left = (now - start) / (done - before) * (total - done)
            console.print(f"{what}: {done} of {total} samples, {left:.0f} s left")

    yield tell
