"""Reading, converting and writing at once: two threads read ahead, another one writes.

What waits to be written is bounded, so that memory stays that of the largest tensors.
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, Self

import torch

from megasink.atomic import sync

# What may wait to be written, and after how much the disk is made to begin.
_WAITING_BYTES = 128 * 2**20
_SYNC_BYTES = 128 * 2**20
# Steps that are read before their turn, each in a thread: checksums take longer than writing.
_AHEAD = 2


class Background:
    """Runs tasks in their order in one thread; a failed one raises in a later call here."""

    def __init__(self) -> None:
        self._writing = ThreadPoolExecutor(1)
        self._syncing = ThreadPoolExecutor(1)
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._synced: Future[None] | None = None
        self._since_sync = 0

    def run(self, size: int, task: Callable[[], None]) -> None:
        """Queue a task that holds `size` bytes; waits while too much is held.

        Raises:
            OSError: an earlier task could not write.
        """
        self._waiting.append((self._writing.submit(task), size))
        held = sum(size for _, size in self._waiting)
        while held > _WAITING_BYTES:
            future, size = self._waiting.popleft()
            future.result()
            held -= size

    def wrote(self, file: BinaryIO, size: int) -> None:
        """Called by tasks: let the disk begin with what is written, while more of it is."""
        self._since_sync += size
        if self._since_sync < _SYNC_BYTES:
            return
        self._since_sync = 0
        if self._synced is None or self._synced.done():
            # A descriptor of its own: the file may be closed before its turn comes.
            self._synced = self._syncing.submit(_sync_and_close, os.dup(file.fileno()))

    def wait(self) -> None:
        """Until everything queued is written.

        Raises:
            OSError: a task could not write.
        """
        while self._waiting:
            self._waiting.popleft()[0].result()
        if self._synced is not None:
            self._synced.result()

    def close(self) -> None:
        """End the threads; what was not begun is dropped."""
        self._writing.shutdown(cancel_futures=True)
        self._syncing.shutdown()


class BackgroundWriter:
    """What writes one file after another in the background; the end of its context ends that."""

    def __init__(self) -> None:
        self._background = Background()
        self._file: BinaryIO | None = None

    def _close_file(self) -> None:
        """Let the file that is open reach the disk."""
        assert self._file is not None
        sync(self._file)
        self._file.close()
        self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._background.close()
        if self._file is not None:
            self._file.close()


def ahead[S, R](steps: Iterable[S], read: Callable[[S], R]) -> Iterator[tuple[S, R]]:
    """Each step with what `read` returns for it; the next two are read meanwhile.

    Raises:
        Exception: what `read` raises, at its step.
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
    """Let torch ask for them: new memory, which every tensor here is, costs half the time then.

    Before torch's first large tensor, which is when torch looks.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _sync_and_close(descriptor: int) -> None:
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in the calling thread alone: others would spin where the writer runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
