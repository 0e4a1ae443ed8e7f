"""``python -m megasink.training.meeting ARGUMENTS``: torchrun on one of several hosts.

torchrun waits ten minutes for a host that does not come, without a word, and then prints
tracebacks. Here each host says for whom it waits, and errors of the meeting are one line.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from megasink.training.stop import write_to_stderr
from megasink.training.waiting import HERE, waiting

_HERE, _ENDED = "megasink/here", "megasink/ended"
_END_SECONDS = 30.0  # for ranks to end by themselves where those of another host have failed
_SECONDS = 5.0  # for an answer of the store, and between two looks at it


class Hosts:
    """A thread that knows, through the store where torchrun's agents meet, which hosts are there.

    It says for whom this host waits, and which ranks of other hosts have failed.

    Args:
        endpoint: HOST:PORT.
        number: of hosts.
        ends: whether torchrun here ends soon after that of another host: no ranks are started
            again that could go on together.

    Attributes:
        have_met: whether all hosts have come.
    """

    def __init__(self, endpoint: str, number: int, *, ends: bool = False):
        self._endpoint, self._number, self._ends = endpoint, number, ends
        self.have_met = False
        self._here: dict[str, str] = {}  # names, and how many hosts each was told of
        self._store: Any = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._live, name="hosts", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        if not self._here:
            return f"{self._endpoint}, where no torchrun answers"
        missing, here = self._number - len(self._here), ", ".join(sorted(self._here)[:8])
        return f"{missing} of {self._number} hosts at {self._endpoint} (here: {here})"

    def leave(self, failed: str = "") -> None:
        """End the thread, and tell the other hosts what failed on this one."""
        self._leaving.set()
        self._thread.join(2 * _SECONDS)
        if failed and self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.append(_ENDED, f"{' '.join(failed.split())}\n")

    def _live(self) -> None:
        reported: set[str] = set()
        with waiting(lambda: str(self), of_rank=False):
            while len(self._here) < self._number and not self._leaving.wait(1.0):
                self._here = dict(line.rsplit(" ", 1) for line in self._lines(_HERE))
                if wrong := {n: k for n, k in self._here.items() if k != str(self._number)}:
                    name, number = wrong.popitem()
                    write_to_stderr(
                        f"megasink: error: {HERE} has NNODES={self._number}, {name} "
                        f"NNODES={number}: give every host the same"
                    )
                    self._leaving.wait(_SECONDS)  # the store may be of this process
                    os._exit(1)  # torchrun has started nothing yet, and handles no signal
        self.have_met = len(self._here) >= self._number
        while not self._leaving.wait(_SECONDS):
            for line in self._lines(_ENDED):
                if line not in reported:
                    write_to_stderr(line)
                reported.add(line)
            if reported and self._ends and not self._leaving.wait(_END_SECONDS):
                os.kill(os.getpid(), signal.SIGTERM)  # torchrun hands it to its ranks
                return

    def _lines(self, key: str) -> list[str]:
        """Return what the hosts have written; empty while the store is not there."""
        from torch.distributed import TCPStore

        host, _, port = self._endpoint.rpartition(":")
        timeout = timedelta(seconds=_SECONDS)
        try:
            if self._store is None:
                store: Any = TCPStore(host, int(port), wait_for_workers=False, timeout=timeout)
                store.append(_HERE, f"{HERE} {self._number}\n")
                self._store = store
            if self._store.check([key]):
                return list(self._store.get(key).decode().splitlines())
        except RuntimeError:  # from torch: not there yet, or gone
            self._store = None
        return []


def main(argv: Sequence[str]) -> int:
    """Run torchrun with these arguments; return the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    args = parse_args(list(argv))
    hosts = Hosts(args.rdzv_endpoint, int(args.nnodes), ends=args.max_restarts == 0)
    failed = ""
    try:
        run(args)
    except ChildFailedError as error:
        # Its own text is a table of 15 lines behind a traceback.
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"by {failure.signal_name()}" if code < 0 else f"with exit code {code}"
        failed = f"megasink: {HERE}: rank {rank} was ended {how}"
        write_to_stderr(failed)
        return 1
    except RendezvousError as error:
        why, where = " ".join(str(error.__cause__ or error).split()), args.rdzv_endpoint
        if hosts.have_met:
            write_to_stderr(f"megasink: {HERE}: torchrun has ended at {where} ({why})")
        else:
            write_to_stderr(
                f"megasink: error: {HERE}: the hosts did not meet at {where}, which is "
                f"MASTER_ADDR:MASTER_PORT ({why})"
            )
        return 1
    except SignalException as error:
        write_to_stderr(f"megasink: {HERE}: {error}")
        return 1
    except Exception as error:
        failed = f"megasink: {HERE}: torchrun ended with {type(error).__name__}: {error}"
        raise
    finally:
        hosts.leave(failed)
    return 0


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # a thread that is inside of torch's store would abort the exit
