"""Keep both cores of a conversion busy: read or compute ahead in threads."""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch

# Steps read ahead, each in a thread: checksums take longer than writing.
_AHEAD = 2


def ahead[S, R](steps: Iterable[S], read: Callable[[S], R]) -> Iterator[tuple[S, R]]:
    """Yield each step with the result of `read`, reading the next two in the meantime."""
    with ThreadPoolExecutor(_AHEAD) as reading:
        waiting: deque[tuple[S, Future[R]]] = deque()
        for step in steps:
            waiting.append((step, reading.submit(read, step)))
            if len(waiting) > _AHEAD:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)


def made_ahead[T](items: Iterator[T]) -> Iterator[T]:
    """Yield the items, each made in a thread while the one before it is in use."""
    with ThreadPoolExecutor(1) as making:
        waiting = making.submit(list, islice(items, 1))
        while item := waiting.result():
            waiting = making.submit(list, islice(items, 1))
            yield item.pop()


def _first[S, R](waiting: deque[tuple[S, Future[R]]]) -> tuple[S, R]:
    step, future = waiting.popleft()
    return step, future.result()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Restrict torch to one thread, and let it use huge pages, which halve the cost of memory."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
