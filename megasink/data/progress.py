"""Progress while a corpus is read: a bar on a terminal, a line now and then in a log file."""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megasink.data.corpus import Corpus, Document

_LOG_SECONDS = 30.0


def tracked(corpus: Corpus, label: str, console: Console | None = None) -> Iterator[Document]:
    """The documents of `corpus`, with rate and time left shown on stderr meanwhile."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield from _logged(corpus, label, console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=corpus.total_bytes)
        for document in corpus:
            progress.update(task, completed=corpus.read_bytes)
            yield document


def _logged(corpus: Corpus, label: str, console: Console) -> Iterator[Document]:
    start = last = time.monotonic()
    for document in corpus:
        now = time.monotonic()
        if now - last > _LOG_SECONDS:
            last = now
            rate = max(corpus.read_bytes, 1) / (now - start)
            left = (corpus.total_bytes - corpus.read_bytes) / rate
            console.print(
                f"{label}: {decimal(corpus.read_bytes)} of {decimal(corpus.total_bytes)}, "
                f"{decimal(int(rate))}/s, {left:.0f} s left"
            )
        yield document
