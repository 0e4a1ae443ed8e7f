"""What a process did to the hollow GPU, and from which line."""

import ctypes
import linecache
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from megasink.plan.collectives import in_package
from megasink.plan.hollow.compile_libraries import library

# The order of `Kind` in native/hollow.h.
KINDS = ("launch", "gemm", "copy", "sync", "collective", "allocate", "free", "fill")
ON_DEVICE, HOST_TO_HOST = "on device", "host to host"
_ON_DEVICE = ON_DEVICE.encode()
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_long, ctypes.c_long)


@dataclass(frozen=True)
class Line:
    """A line of source on the stack: module, file, number, function, text without indentation."""

    module: str
    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """The source, by which an allow-list survives a new release better than by numbers."""
        return linecache.getline(self.file, self.number).strip()


@dataclass(frozen=True)
class Event:
    """One call into the CUDA libraries.

    Attributes:
        kind: One of `KINDS`.
        name: Mangled name of the kernel, function of cuBLAS or NCCL, or which way a copy goes.
        first: Thread blocks of a launch, floating-point operations of a gemm, else bytes.
        second: Threads in a block, rows of the product, ranks of a collective's group, else 0.
        stack: Innermost line first; empty if the kind was not asked for, or the call came from a
            thread without Python.
    """

    kind: str
    name: str
    first: int
    second: int
    stack: tuple[Line, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device, or would for a copy of pageable memory."""
        return self.kind == "sync" or (self.kind == "copy" and "pageable" in self.name)

    @property
    def crosses(self) -> bool:
        """Whether it copies between host and device."""
        return self.kind == "copy" and self.name not in (ON_DEVICE, HOST_TO_HOST)

    def line_in(self, *packages: str) -> Line | None:
        """Return the innermost line of a module in one of these packages (``megatron``)."""
        return next((line for line in self.stack if in_package(line.module, *packages)), None)


class Recording:
    """A context manager that keeps the events of its body, of all threads.

    Args:
        kinds: What to record.
        stacks: For which of them to keep the stack, which takes longer than the event; copies on
            the device have none.

    Attributes:
        events: What happened, in order.
    """

    def __init__(
        self, kinds: Iterable[str] = KINDS, stacks: Iterable[str] = ("copy", "sync")
    ) -> None:
        self.events: list[Event] = []
        self._kinds, self._stacks = frozenset(kinds), frozenset(stacks)
        self._library: Any = ctypes.CDLL(library())
        self._listener = _LISTENER(self._hear)

    def _hear(self, kind: int, name: bytes, first: int, second: int) -> None:
        known = KINDS[kind]
        wanted = known in self._stacks and name != _ON_DEVICE
        stack = _stack(sys._getframe().f_back) if wanted else ()
        self.events.append(Event(known, name.decode(), first, second, stack))

    def __enter__(self) -> Self:
        bits = sum(1 << KINDS.index(kind) for kind in self._kinds)
        self._library.hollow_listen(self._listener, bits)
        return self

    def __exit__(self, *_: object) -> None:
        self._library.hollow_listen(_LISTENER(), 0)

    def counts(self) -> Counter[str]:
        """Return the number of events of each kind."""
        return Counter(event.kind for event in self.events)


def _stack(frame: FrameType | None) -> tuple[Line, ...]:
    lines = []
    while frame is not None:
        code = frame.f_code
        module = frame.f_globals.get("__name__", "")
        lines.append(Line(module, code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(lines)
