"""Coordinate the processes of one analysis: shard claims, failures and completion.

torchrun (or any launcher that sets its variables) starts the processes. Each holds the whole model,
exchanges measurements through files, and shares counters in a key-value store, on any device.
"""

import contextlib
import io
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from megasink.errors import UserError

if TYPE_CHECKING:  # flags must be checked without torch
    from torch.distributed import Store

_POLL_SECONDS, _GRACE_SECONDS = 0.05, 3.0


class Ranks:
    """One process's view of the group; rank 0 writes the results."""

    def __init__(self, store: "Store | None" = None, rank: int = 0, size: int = 1):
        self._given, self.rank, self.size = store, rank, size

    @cached_property
    def _root(self) -> "Store":
        from torch.distributed import HashStore

        return HashStore() if self._given is None else self._given

    @cached_property
    def _store(self) -> "Store":
        return self._root

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Build from torchrun's environment variables; a single process if they are unset."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        from torch.distributed.rendezvous import rendezvous

        store, rank, size = next(iter(rendezvous("env://")))
        return cls(store, rank, size)

    def enter(self, analysis: str) -> None:
        """Start counting for this analysis; every process enters the same analyses in order."""
        from torch.distributed import PrefixStore

        self._store = PrefixStore(analysis, self._root)

    def claims(self, count: int) -> Iterator[int]:
        """Yield numbers below `count`, each claimed by exactly one process."""
        while (number := self._store.add("claimed", 1) - 1) < count:
            yield number

    def advance(self, samples: int) -> int:
        """Add to the number of finished samples, and return the total."""
        return self._store.add("samples", samples)

    def reach(self, point: str) -> None:
        """Announce that this process has reached a point."""
        self._store.add(point, 1)

    def wait(self, point: str, count: int, tell: Callable[[int], None] | None = None) -> None:
        """Wait until so many processes have reached a point; `tell` gets the finished samples."""
        while self._store.add(point, 0) < count:
            if self._root.add("failed", 0):
                _leave()
            if tell is not None:
                tell(self.advance(0))
            time.sleep(_POLL_SECONDS)

    def is_first_to_fail(self) -> bool:
        """Record that this process failed; return whether it is the first."""
        if self.size == 1:
            return True
        from torch.distributed import DistError

        try:
            return self._root.add("failed", 1) == 1
        except DistError:  # the process hosting the store has exited
            return False

    def device(self, requested: str) -> str:
        """Return the device of this process; several processes have one CUDA device each."""
        if self.size == 1 or requested == "cpu":
            return requested
        if requested != "cuda":
            raise UserError(
                f"--device {requested} with {self.size} processes: use --device cuda, which "
                "gives each process its own GPU"
            )
        import torch

        local, count = int(os.environ.get("LOCAL_RANK", self.rank)), torch.cuda.device_count()
        if local >= count:
            raise UserError(
                f"at least {local + 1} processes were started on a machine with {count} CUDA "
                f"devices: start at most {count} there (--nproc-per-node {count})"
            )
        torch.cuda.set_device(local)
        return f"cuda:{local}"


@contextlib.contextmanager
def taking_part() -> Iterator[Ranks]:
    """Yield the processes of this analysis; a failure prints one line, and rank 0 all the rest."""
    ranks = Ranks.from_environment()
    with contextlib.ExitStack() as stack:
        if ranks.rank:
            warnings.simplefilter("ignore")
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            yield ranks
        except UserError:
            if ranks.is_first_to_fail():
                raise
            _leave()
        except Exception:
            ranks.is_first_to_fail()
            raise


def _leave() -> NoReturn:
    """Exit silently, after the first process to fail had time to print: then the launcher kills."""
    time.sleep(_GRACE_SECONDS)
    raise SystemExit(2)
