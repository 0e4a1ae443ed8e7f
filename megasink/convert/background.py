"""Read ahead in two threads and write in a third while the caller converts.

The amount of data waiting to be written is bounded, so peak memory is that of the largest tensors.
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, Self

import torch

from megasink.atomic import sync

# Limit on data waiting to be written, and the amount after which to start flushing to disk.
_WAITING_BYTES = 128 * 2**20
_SYNC_BYTES = 128 * 2**20
# Steps read ahead, each in a thread: checksums take longer than writing.
_AHEAD = 2


class BackgroundWriter:
    """Base of classes that write one file after another in a thread, which ends with the context.

    Tasks run in order; the exception of a failed one is raised by a later call in the main thread.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._writing = ThreadPoolExecutor(1)
        self._syncing = ThreadPoolExecutor(1)
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._synced: Future[None] | None = None
        self._since_sync = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._writing.shutdown(cancel_futures=True)
        self._syncing.shutdown()
        if self._file is not None:
            self._file.close()

    def _run(self, size: int, task: Callable[[], None]) -> None:
        """Queue a task that holds `size` bytes; block while too much is held.

        Raises:
            OSError: an earlier task failed to write.
        """
        self._waiting.append((self._writing.submit(task), size))
        held = sum(size for _, size in self._waiting)
        while held > _WAITING_BYTES:
            future, size = self._waiting.popleft()
            future.result()
            held -= size

    def _wrote(self, size: int) -> None:
        """Flush what a task wrote to the open file in the background, while writing continues."""
        assert self._file is not None
        self._since_sync += size
        if self._since_sync < _SYNC_BYTES:
            return
        self._since_sync = 0
        if self._synced is None or self._synced.done():
            # A separate descriptor: the file may be closed before its turn comes.
            self._synced = self._syncing.submit(_sync_and_close, os.dup(self._file.fileno()))

    def _close_file(self) -> None:
        """Flush and close the open file."""
        assert self._file is not None
        sync(self._file)
        self._file.close()
        self._file = None

    def _wait(self) -> None:
        """Block until all queued tasks are done.

        Raises:
            OSError: a task failed to write.
        """
        while self._waiting:
            self._waiting.popleft()[0].result()
        if self._synced is not None:
            self._synced.result()


def ahead[S, R](steps: Iterable[S], read: Callable[[S], R]) -> Iterator[tuple[S, R]]:
    """Yield each step with the result of `read`, reading the next two in the meantime.

    Raises:
        Exception: whatever `read` raises, at that step.
    """
    with ThreadPoolExecutor(_AHEAD) as reading:
        waiting: deque[tuple[S, Future[R]]] = deque()
        for step in steps:
            waiting.append((step, reading.submit(read, step)))
            if len(waiting) > _AHEAD:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)


def _first[S, R](waiting: deque[tuple[S, Future[R]]]) -> tuple[S, R]:
    step, future = waiting.popleft()
    return step, future.result()


def use_large_pages() -> None:
    """Let torch request huge pages, which halves the cost of new memory (every tensor here).

    Call it before torch allocates its first large tensor, when it reads the setting.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _sync_and_close(descriptor: int) -> None:
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Restrict torch to the calling thread; its other threads would spin next to the writer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
