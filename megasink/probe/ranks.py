"""Several processes of one analysis: who takes which shard, who has failed, who is done.

They are started by torchrun (or anything that sets its variables). Each holds the whole model, what
they measure meets in files (shards.py), and all that they tell each other are counters: a key-value
store is enough, on any device.
"""

import contextlib
import io
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from torch.distributed import HashStore, PrefixStore, Store

from megasink.errors import UserError

_POLL_SECONDS, _GRACE_SECONDS = 0.05, 3.0


class Ranks:
    """One process's view of the others.

    Args:
        store: that all share.
        rank: of this process; rank 0 writes the results.
        size: processes in all.
    """

    def __init__(self, store: Store | None = None, rank: int = 0, size: int = 1):
        self._root = HashStore() if store is None else store
        self._store: Store = self._root
        self.rank, self.size = rank, size

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Of the variables that torchrun sets; a process alone where there are none."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        from torch.distributed.rendezvous import rendezvous

        store, rank, size = next(iter(rendezvous("env://")))
        return cls(store, rank, size)

    def enter(self, analysis: str) -> None:
        """What follows counts for this analysis; every process enters the same ones in order."""
        self._store = PrefixStore(analysis, self._root)

    def claims(self, count: int) -> Iterator[int]:
        """Numbers below `count`, each of them to one process."""
        while (number := self._store.add("claimed", 1) - 1) < count:
            yield number

    def advance(self, samples: int) -> int:
        """Count samples that are done; the number of all."""
        return self._store.add("samples", samples)

    def reach(self, point: str) -> None:
        """Tell the others that this process has come to a point."""
        self._store.add(point, 1)

    def await_all(self, point: str, tell: Callable[[int], None] | None = None) -> None:
        """Wait until every process has reached a point.

        Args:
            tell: is given the number of samples that are done, now and then.

        Raises:
            SystemExit: another process has failed, and said so.
        """
        self._await(point, self.size, tell)

    def await_first(self, point: str) -> None:
        """Wait until rank 0 has reached a point that it alone reaches.

        Raises:
            SystemExit: as `await_all`.
        """
        self._await(point, 1, None)

    def _await(self, point: str, count: int, tell: Callable[[int], None] | None) -> None:
        while self._store.add(point, 0) < count:
            if self._root.add("failed", 0):
                _leave()
            if tell is not None:
                tell(self.advance(0))
            time.sleep(_POLL_SECONDS)

    def is_first_to_fail(self) -> bool:
        """Note that this process fails; whether no other has before."""
        try:
            return self._root.add("failed", 1) == 1
        except torch.distributed.DistError:  # whoever kept the store has failed and gone
            return False

    def device(self, asked: str) -> str:
        """The device of this process: with several, one CUDA device each.

        Raises:
            UserError: more processes on this machine than devices, or one device for all.
        """
        if self.size == 1 or asked == "cpu":
            return asked
        if asked != "cuda":
            raise UserError(f"--device {asked} with {self.size} processes: cuda gives each its own")
        local, count = int(os.environ.get("LOCAL_RANK", self.rank)), torch.cuda.device_count()
        if local >= count:
            raise UserError(
                f"{local + 1} processes or more on a machine with {count} CUDA devices: start at "
                f"most {count} there (--nproc-per-node {count})"
            )
        torch.cuda.set_device(local)
        return f"cuda:{local}"


@contextlib.contextmanager
def taking_part() -> Iterator[Ranks]:
    """The processes of this analysis; of what goes wrong in several, one line is printed.

    Rank 0 alone prints anything else.
    """
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
    """End without a word, but not before the process that failed first has had its say.

    A launcher ends all processes as soon as one has ended.
    """
    time.sleep(_GRACE_SECONDS)
    raise SystemExit(2)
