"""Progress reports: a bar on a terminal, periodic lines elsewhere."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # errors of a command line draw nothing, and must not import rich
    from rich.console import Console

_ESTIMATE_SECONDS = 600.0
"""Seconds of history for estimating the remaining time; a step or sample may take minutes."""
_UPDATE_SECONDS = 0.1  # thousands of documents per second
_FIRST_SECONDS = 2.0
"""Seconds until the first progress line if the output is not a terminal."""

Tell = Callable[..., None]
"""``tell(done, state="", now=False)``: set the total done so far; `now` prints a line at once."""


@contextmanager
def progress(
    what: str,
    total: float | None,
    unit: str,
    *,
    before: int = 0,
    console: "Console | None" = None,
    every: float = 30.0,
    slow: bool = False,
) -> Iterator[Tell]:
    """Show progress and the remaining time, by the rate of this process since `before`."""
    # Without a terminal it prints a line every `every` seconds, the first one at once if the units
    # are `slow`. With 0 it prints a line at every call and draws no bar.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = console or Console(stderr=True)
    is_bar = console.is_terminal and every > 0
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not is_bar,
        speed_estimate_period=_ESTIMATE_SECONDS,
        get_time=time.monotonic,
    ) as bar:
        bar.add_task(what, total=total, completed=before, text="")
        (task,) = bar.tasks
        updated, due = -math.inf, time.monotonic() + min(_FIRST_SECONDS, every)

        def tell(done: float, state: str = "", *, now: bool = False) -> None:
            nonlocal updated, due
            clock, now = time.monotonic(), now or every == 0
            if not now and clock - updated < _UPDATE_SECONDS:
                return
            updated = clock
            bar.update(task.id, completed=done)
            text = "  ".join(filter(None, [_amount(task, unit), state]))
            bar.update(task.id, text=text)
            is_due = clock >= due and before < done < (total or math.inf)
            if console.quiet or not (now or (is_due and not is_bar)):
                return
            due = clock + every
            left = task.time_remaining
            rest = "" if left is None else f", {timedelta(seconds=math.ceil(left))} left"
            line = f"{what}: {text}{rest}"
            if is_bar:
                bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:  # not through rich, which exits the process on a broken pipe
                print(line, file=console.file, flush=True)

        if slow and not is_bar and before < (total or math.inf):
            tell(before, now=True)
        yield tell


def tracked[T](items: Iterable[T], what: str, total: int, unit: str, **options: Any) -> Iterator[T]:
    """Yield the items, reporting each as done when the next one is requested."""
    with progress(what, total, unit, **options) as tell:
        for count, item in enumerate(items, 1):
            yield item
            tell(count)


def _amount(task: Any, unit: str) -> str:
    if unit == "bytes":
        from rich.filesize import decimal

        rate = f", {decimal(int(task.speed))}/s" if task.speed else ""
        return f"{decimal(int(task.completed))} of {decimal(int(task.total))}{rate}"
    total = "" if task.total is None else f" of {task.total:,.0f}"
    return f"{math.floor(task.completed):,}{total} {unit}"
