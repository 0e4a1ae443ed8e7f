"""``python -m megasink.training.meeting ARGUMENTS``: torchrun on one of several hosts.

torchrun waits ten minutes for a host that does not come, without a word, and then prints
tracebacks. Here each host says for whom it waits, errors of the meeting are one line, and what a
rank gave torchrun as the reason of its end (TORCHELASTIC_ERROR_FILE) is said on every host.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from megasink.training.flag_file import named_values
from megasink.training.stop import write_to_stderr
from megasink.training.waiting import here, waiting

_HERE, _ENDED = "megasink/here", "megasink/ended"
_CLOCK = "megasink/clock"  # with the id of a host: the time there
_END_SECONDS = 30.0  # for ranks to end by themselves where those of another host have failed
_SECONDS = 5.0  # for an answer of the store, and between two looks at it
_GONE_SECONDS = 20.0  # after which a host that has not written is taken for gone
_APART_SECONDS = 10.0  # torchrun drops a host whose clock is 15 s off
_WITHOUT = "megasink"  # id of a job without a run folder


class Hosts:
    """A thread that knows, through the store where torchrun's agents meet, which hosts are there.

    It says for whom this host waits, refuses hosts that cannot go together, and says which ranks of
    other hosts have failed.

    Args:
        endpoint: HOST:PORT.
        number: of hosts.
        job: the id that all hosts of a job, and no other job, have.
        address: of this host.
        ends: whether torchrun here ends soon after that of another host: no ranks are started
            again that could go on together.

    Attributes:
        have_met: whether all hosts have come.
    """

    def __init__(
        self,
        endpoint: str,
        number: int,
        job: str = _WITHOUT,
        address: str = "",
        *,
        ends: bool = False,
    ):
        self._endpoint, self._number, self._ends = endpoint, number, ends
        self._me: dict[str, Any] = {"id": uuid.uuid4().hex, "host": here(), "address": address}
        self._me |= {"number": number, "job": job}
        self.have_met = False
        self._here: list[dict[str, Any]] = []  # hosts that are there, in the order of their coming
        self._times: dict[
            str, tuple[float, float]
        ] = {}  # by id: a host's clock, and when it ticked
        self._looked = time.monotonic()
        self._said: set[str] = set()
        self._store: Any = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._live, name="hosts", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        if not self._here:
            return f"{self._endpoint}, where no torchrun answers"
        mine = [host for host in self._here if host["job"] == self._me["job"]]
        names = ", ".join(sorted(map(self.name, mine))[:8])
        missing = self._number - len(mine)
        return f"{missing} of {self._number} hosts at {self._endpoint} (here: {names})"

    def name(self, host: dict[str, Any] | None = None) -> str:
        """Return the name of a host, or of this one; with its address if another one has it too."""
        host = host or self._me
        alike = [other for other in self._here if other["host"] == host["host"]]
        return f"{host['host']} ({host['address']})" if len(alike) > 1 else str(host["host"])

    def leave(self, failed: str = "") -> None:
        """End the thread; if a rank has failed, exchange the reasons with the other hosts first."""
        self._leaving.set()
        self._thread.join(2 * _SECONDS)
        if not failed or self._store is None:
            return
        with contextlib.suppress(RuntimeError):
            self._store.append(_ENDED, f"{' '.join(failed.split())}\n")
        self._said.add(failed)
        # The store may be of this process, and other hosts notice later.
        end = time.monotonic() + 2 * _SECONDS
        while self._report() < self._number and time.monotonic() < end:
            time.sleep(0.5)

    def _live(self) -> None:
        with waiting(lambda: str(self), of_rank=False):
            while not self.have_met and not self._leaving.wait(1.0):
                self._look()
        while not self._leaving.wait(_SECONDS):
            self._look()
            if self._report() and self._ends and not self._leaving.wait(_END_SECONDS):
                os.kill(os.getpid(), signal.SIGTERM)  # torchrun hands it to its ranks
                return

    def _look(self) -> None:
        """Find the hosts that are there, by clocks that go on, and refuse those that differ."""
        before, self._looked = self._looked, time.monotonic()
        hosts = [json.loads(line) for line in self._lines(_HERE)]
        keys = [f"{_CLOCK}/{host['id']}" for host in hosts]
        try:
            clocks = list(map(float, self._store.multi_get(keys))) if keys else []
            self._store.set(f"{_CLOCK}/{self._me['id']}", str(time.time()))
        except (RuntimeError, AttributeError):  # the store is gone
            return
        here = []
        for host, clock in zip(hosts, clocks, strict=True):
            last, ticked = self._times.get(host["id"], (clock, -_GONE_SECONDS))
            if clock != last:
                ticked = self._looked
                ahead = clock - time.time()
                # It was written since the last look here.
                apart = ahead if ahead > 0 else min(0.0, ahead + self._looked - before)
                self._refuse(host, apart)
            self._times[host["id"]] = (clock, ticked)
            if self._looked - ticked < _GONE_SECONDS:
                here.append(host)
        self._here = here
        mine = [host for host in here if host["job"] == self._me["job"]]
        self.have_met = self.have_met or len(mine) >= self._number

    def _refuse(self, host: dict[str, Any], apart: float) -> None:
        """Report why another host and this one cannot train together, and end if they would."""
        me, its = self.name(), self.name(host)
        first = next((one["job"] for one in self._here), self._me["job"])
        if host["job"] != self._me["job"]:
            what = f"{me} has the run {self._me['job']}, {its} {host['job']} at {self._endpoint}"
            advice = "give each job its own MASTER_PORT, and all hosts of a job the same RUN_DIR"
        elif host["number"] != self._number:
            what = f"{me} has NNODES={self._number}, {its} NNODES={host['number']}"
            advice = "give every host the same"
        elif abs(apart) > _APART_SECONDS:
            what = f"the clock of {its} is {apart:+.0f} s from that of {me}"
            advice = "set the clocks of all hosts by NTP (torchrun drops a host 15 s off)"
        else:
            return
        line = f"megasink: error: {what}: {advice}"
        if line not in self._said:
            write_to_stderr(line)
        self._said.add(line)
        if host["job"] == self._me["job"] or first != self._me["job"]:
            self._leaving.wait(_SECONDS)  # the store may be of this process
            os._exit(1)  # torchrun has started nothing yet, and handles no signal

    def _report(self) -> int:
        """Say what the other hosts have said of their end, once; return the number of lines."""
        lines = self._lines(_ENDED)
        for line in lines:
            if line not in self._said:
                write_to_stderr(line)
            self._said.add(line)
        return len(lines)

    def _lines(self, key: str) -> list[str]:
        """Return what the hosts have written; empty while the store is not there."""
        from torch.distributed import TCPStore

        host, _, port = self._endpoint.rpartition(":")
        timeout = timedelta(seconds=_SECONDS)
        try:
            if self._store is None:
                # torch prints pages of C++ frames where nobody listens.
                socket.create_connection((host, int(port)), _SECONDS).close()
                store: Any = TCPStore(host, int(port), wait_for_workers=False, timeout=timeout)
                store.set(f"{_CLOCK}/{self._me['id']}", str(time.time()))
                store.append(_HERE, f"{json.dumps(self._me)}\n")
                self._store = store
            if self._store.check([key]):
                return list(self._store.get(key).decode().splitlines())
        except (RuntimeError, OSError):  # from torch, or the socket: not there yet, or gone
            self._store = None
        return []


def _job(words: Sequence[str]) -> str:
    """Return what a job's hosts have in common, and other jobs have not: the run folder."""
    given = dict(named_values(words)).get("run-dir") or [os.environ.get("RUN_DIR") or _WITHOUT]
    return given[-1]


def main(argv: Sequence[str]) -> int:
    """Run torchrun with these arguments; return the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    args = parse_args(list(argv))
    if args.rdzv_id == "none":  # torchrun's default
        args.rdzv_id = _job(args.training_script_args)
    ends, address = args.max_restarts == 0, args.local_addr or ""
    hosts = Hosts(args.rdzv_endpoint, int(args.nnodes), args.rdzv_id, address, ends=ends)
    failed = ""
    try:
        run(args)
    except ChildFailedError as error:
        # Its own text is a table of 15 lines behind a traceback.
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"by {failure.signal_name()}" if code < 0 else f"with exit code {code}"
        why = f": {failure.message}" if Path(failure.error_file).is_absolute() else ""
        failed = f"megasink: {hosts.name()}: rank {rank} was ended {how}{why}"
        write_to_stderr(failed)
        return 1
    except RendezvousError as error:
        why, where = " ".join(str(error.__cause__ or error).split()), args.rdzv_endpoint
        if hosts.have_met:
            write_to_stderr(f"megasink: {hosts.name()}: torchrun has ended at {where} ({why})")
        else:
            write_to_stderr(
                f"megasink: error: {hosts.name()}: the hosts did not meet at {where}, which is "
                f"MASTER_ADDR:MASTER_PORT ({why})"
            )
        return 1
    except SignalException as error:
        write_to_stderr(f"megasink: {hosts.name()}: {error}")
        return 1
    except Exception as error:
        failed = f"megasink: {hosts.name()}: torchrun ended with {type(error).__name__}: {error}"
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
