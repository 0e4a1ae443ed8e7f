"""``python -m megasink.training.multi_host_torchrun ARGUMENTS``: torchrun on one of several hosts.

torchrun silently waits ten minutes for a missing host, and then prints tracebacks. Here each host
reports which hosts it is waiting for, errors of the meeting are one line, and the reason that a
rank gave torchrun for its end (TORCHELASTIC_ERROR_FILE) is printed on every host.
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

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

from megasink.training.flag_file import named_values
from megasink.training.stop import write_to_stderr
from megasink.training.waiting import clocks_apart, here, waiting

_HERE, _ENDED = "megasink/here", "megasink/ended"
_CLOCK = "megasink/clock"  # with the id of a host: the time there
_END_SECONDS = 30.0  # for ranks to end by themselves after another host's have failed
_SECONDS = 5.0  # for an answer of the store
_LOOK_SECONDS = 5.0  # between two reads of it
_GONE_SECONDS = 20.0  # after which a silent host counts as gone


class Hosts:
    """A thread that tracks, in torchrun's store, which hosts are present and why they end."""

    # With `ends`, it ends torchrun here some time after another host's ranks have ended.

    def __init__(
        self, endpoint: str, number: int, job: str = "", address: str = "", *, ends: bool = False
    ):
        self._endpoint, self._number, self._ends = endpoint, number, ends
        self._me: dict[str, Any] = {"id": uuid.uuid4().hex, "host": here(), "address": address}
        self._me |= {"number": number, "job": job}
        self.have_met = False  # all hosts have come
        self._here: list[dict[str, Any]] = []  # in order of arrival
        self._clocks: dict[str, tuple[str, float]] = {}  # by id: the last time there, and its age
        self._looked = time.monotonic()
        self._said: set[str] = set()
        self._store: Any = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._live, name="hosts", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        if not (mine := [host for host in self._here if host["job"] == self._me["job"]]):
            return f"{self._endpoint}, where no torchrun answers"
        names = ", ".join(sorted(map(self.name, mine))[:8])
        missing = self._number - len(mine)
        return f"{missing} of {self._number} hosts at {self._endpoint} (here: {names})"

    def name(self, host: dict[str, Any] | None = None) -> str:
        """Return the name of a host (default: this one), with its address if not unique."""
        host = host or self._me
        alike = [other for other in self._here if other["host"] == host["host"]]
        return f"{host['host']} ({host['address']})" if len(alike) > 1 else str(host["host"])

    def at_the_store(self, ranks: str) -> str:
        """Report that the host of torchrun's store, with this number of `ranks`, is gone."""
        mine = [host for host in self._here if host["job"] == self._me["job"]]
        order = sorted(mine, key=lambda host: str(host["address"]))  # as torchrun numbers them
        place = self._endpoint.rpartition(":")[0]
        with contextlib.suppress(OSError):
            place = socket.gethostbyname(place)
        for number, host in enumerate(order):
            if host["address"] == place and ranks.isdigit():
                named = f"{self.name(host)} with rank {number * int(ranks)}"
                return f"{named} has ended or cannot be reached at {self._endpoint}"
        return f"torchrun has ended at {self._endpoint}"

    def leave(self, failed: str) -> None:
        """Exchange the reasons of the end with the other hosts, then end the thread."""
        self._leaving.set()
        self._thread.join(2 * _SECONDS)
        self._say(failed := " ".join(failed.split()))
        with contextlib.suppress(RuntimeError, AttributeError):  # the store is gone
            self._store.append(_ENDED, f"{failed}\n")
        end = time.monotonic() + 2 * _SECONDS
        while self._store and self._report() < self._number and time.monotonic() < end:
            time.sleep(0.5)
            self._look()

    def _live(self) -> None:
        with waiting(lambda: str(self), of_rank=False):
            while not self.have_met and not self._leaving.wait(min(1.0, _LOOK_SECONDS)):
                self._look()
                self._report()
        while not self._leaving.wait(_LOOK_SECONDS):
            self._look()
            if self._report() and self._ends and not self._leaving.wait(_END_SECONDS):
                os.kill(os.getpid(), signal.SIGTERM)  # torchrun hands it to its ranks
                return

    def _look(self) -> None:
        """Find the present hosts, whose clocks in the store advance, and compare them."""
        before, self._looked = self._looked, time.monotonic()
        hosts = {host["id"]: host for host in map(json.loads, self._lines(_HERE))}
        try:
            clocks = self._store.multi_get([f"{_CLOCK}/{name}" for name in hosts]) if hosts else []
            self._tick(self._store)
        except (RuntimeError, AttributeError):  # the store is gone
            return
        going = []
        for name, clock in zip(hosts, map(bytes.decode, clocks), strict=True):
            last, since = self._clocks.get(name, (clock, -_GONE_SECONDS))
            self._clocks[name] = (clock, since if clock == last else self._looked)
            if clock != last:
                # It was written between the last read and this one.
                ahead = float(clock) - time.time()
                self._compare(hosts[name], ahead, ahead + self._looked - before)
            if self._looked - self._clocks[name][1] < _GONE_SECONDS:
                going.append(hosts[name])
        self._here = going
        mine = sum(host["job"] == self._me["job"] for host in going)
        self.have_met = self.have_met or mine >= self._number

    def _tick(self, store: Any) -> None:
        store.set(f"{_CLOCK}/{self._me['id']}", str(time.time()))

    def _compare(self, host: dict[str, Any], least: float, most: float) -> None:
        """Report why this host and another cannot train together, and end if this one is wrong."""
        me, its, job = self.name(), self.name(host), self._me["job"]
        is_mine = host["job"] == job
        if not is_mine:
            what = f"{me} has the run {job}, but {its} has {host['job']} at {self._endpoint}: "
            what += "give each job its own MASTER_PORT, and all hosts of a job the same RUN_DIR"
        elif self.have_met:
            return  # a clock may be corrected during training
        elif host["number"] != self._number:
            what = f"{me} has NNODES={self._number}, but {its} has NNODES={host['number']}: "
            what += "give every host the same"
        elif not (what := clocks_apart(its, me, least, most)):
            return
        self._say(f"megasink: error: {what}")
        if is_mine or (self._here and self._here[0]["job"] != job):
            self._leaving.wait(_SECONDS)  # the store may be of this process
            os._exit(1)  # torchrun has started nothing yet, and handles no signal

    def _say(self, line: str) -> None:
        if line not in self._said:
            write_to_stderr(line)
        self._said.add(line)

    def _report(self) -> int:
        """Print once the other hosts' reasons for their end; return the number of lines."""
        lines = self._lines(_ENDED)
        for line in lines:
            self._say(line)
        return len(lines)

    def _lines(self, key: str) -> list[str]:
        """Return the hosts' entries; empty without a store."""
        host, _, port = self._endpoint.rpartition(":")
        timeout = timedelta(seconds=_SECONDS)
        try:
            if self._store is None:
                # torch prints pages of C++ frames if nobody listens there.
                socket.create_connection((host, int(port)), _SECONDS).close()
                store: Any = TCPStore(host, int(port), wait_for_workers=False, timeout=timeout)
                self._tick(store)
                store.append(_HERE, f"{json.dumps(self._me)}\n")
                self._store = store
            if self._store.check([key]):
                return list(self._store.get(key).decode().splitlines())
        except (RuntimeError, OSError):  # from torch, or the socket: not there yet, or gone
            self._store = None
        return []


def _job(words: Sequence[str]) -> str:
    """Return the identity of a job, shared by its hosts only: the run folder."""
    given = dict(named_values(words)).get("run-dir") or [os.environ.get("RUN_DIR") or "megasink"]
    return given[-1]


def main(argv: Sequence[str]) -> int:
    """Run torchrun with these arguments; return the exit code."""
    args = parse_args(list(argv))
    if args.rdzv_id == "none":  # torchrun's default
        args.rdzv_id = _job(args.training_script_args)
    ends, address = args.max_restarts == 0, args.local_addr or ""
    hosts = Hosts(args.rdzv_endpoint, int(args.nnodes), args.rdzv_id, address, ends=ends)
    try:
        run(args)
    except ChildFailedError as error:
        # Its own text is a table of 15 lines behind a traceback.
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        killed = f"was killed by {failure.signal_name()}"
        how = killed if code < 0 else f"ended with exit code {code}"
        why = f": {failure.message}" if Path(failure.error_file).is_absolute() else ""
        # Inside of this block, whose error holds the store if it is of this process.
        hosts.leave(f"megasink: {hosts.name()}: rank {rank} {how}{why}")
    except (RendezvousError, DistError) as error:
        why, where = str(error.__cause__ or error), args.rdzv_endpoint
        what = f"{hosts.at_the_store(args.nproc_per_node)} ({why})"
        if not hosts.have_met:
            what = f"the hosts did not meet at {where}, which is MASTER_ADDR:MASTER_PORT ({why})"
        hosts.leave(f"megasink: error: {hosts.name()}: {what}")
    except SignalException as error:
        write_to_stderr(f"megasink: {hosts.name()}: {error}")
    except Exception as error:
        traceback.print_exc()
        hosts.leave(f"megasink: {hosts.name()}: {type(error).__name__}: {error}")
    else:
        return 0
    return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a thread inside torch's store would abort the exit
