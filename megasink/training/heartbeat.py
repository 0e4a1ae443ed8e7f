"""Heartbeats: each rank reports its progress every few seconds, so a silent rank can be named.

Collectives fail after --distributed-timeout-minutes without saying which rank is missing or why,
and some waits have no timeout. Heartbeats are kept in the rendezvous store. Each rank monitors only
the next one, so that the cost does not grow with the number of ranks.
"""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from megasink.errors import listed
from megasink.training.stop import RankState
from megasink.training.waiting import here, is_first_here, machine, node, on_several_hosts, until
from megasink.training.watchdog import HAS_ENDED, ON_DISK, Clock, end, guard, state_of

_ENTRIES = "256"  # operations that the recorder keeps; unfinished ones are the newest


def record() -> None:
    """Turn the recorder on, before the process groups are made; a set variable is kept."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)


def under_way() -> str | None:
    """Describe the oldest unfinished operation: ``all_reduce 17 of GROUP (Float [100])``."""
    import torch
    from torch._C import _distributed_c10d as c10d

    if torch.cuda.is_initialized():
        # The dump may ask CUDA events, and a thread begins on device 0: it would open a context
        # there, on every host one for each rank. The same device as in Megatron's initialize.py.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    active: list[dict[str, Any]] = []
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(c10d, dump):  # the second one is NCCL's own
            text = getattr(c10d, dump)(includeCollectives=True, onlyActive=True)
            entries = json.loads(text).get("entries") or []
            active += [entry for entry in entries if not entry["retired"]]
    if not active:
        return None
    entry = min(active, key=lambda entry: int(entry["time_created_ns"]))
    operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    group = entry["process_group"][1] or entry["process_group"][0]
    first = zip(entry["input_dtypes"][:1], entry["input_sizes"][:1], strict=True)
    return f"{operation} {number} of {group}" + "".join(f" ({t} {s})" for t, s in first)


SECONDS = 2.0  # between two beats in a small run
_LEAVE_SECONDS = 5.0  # for a beat in progress, or the first one
_WORDS_SECONDS = 5.0  # for this rank to end by itself after another one has reported why it ends
ENDED = "ended"
# Messages of torch's communication libraries when a rank is gone or does not respond.
_LOST = re.compile(
    r"gloo/transport|gloo::|connection (was )?(closed|reset|refused) by|timed out (waiting|after) "
    r"|broken pipe|NCCL (error|watchdog)|TCPStore|socketStartConnect",
    re.I,
)


class Heartbeat:
    """Send this rank's heartbeats over a connection of their own, and read those of the others."""

    def __init__(self, store: Any, rank: int, world: int, interval: float = SECONDS):
        self._store, self._rank, self._world, self._interval = store, rank, world, interval
        self._count = 0
        self._clock = Clock(interval)
        self._last_place: tuple[int | None, str] | None = None
        self._seen: tuple[int, float] = (0, 0.0)  # the next rank's last beat, and when it arrived
        self._words, self._heard = "", 0.0  # why a rank ends, and when that arrived
        self._holder: dict[str, Any] | None = None  # a beat of rank 0, which may hold the store

    def beat(self) -> None:
        """Send this rank's state to the others."""
        self._count += 1
        place = (RankState.step, RankState.phase)
        beat: dict[str, Any] = {"count": self._count, "step": place[0], "phase": place[1]}
        beat |= {"host": here(), "machine": machine(), "pid": os.getpid(), "time": time.time()}
        if place == self._last_place:  # no progress since: cheap where steps are short
            beat["collective"] = under_way()
        self._last_place = place
        self._store.set(str(self._rank), json.dumps(beat))
        self._holder = self._holder or self._beat_of(0)

    def tell(self, words: str) -> None:
        """Report why this rank ends, unless another one ended before."""
        rank = f"rank {self._rank} on {here()}"
        self._store.compare_set(f"{RankState.attempt}/words", "", f"{rank}: {words}")

    def words(self) -> str:
        """Return why a rank has ended; empty without a report."""
        if not self._words and self._store.check([f"{RankState.attempt}/words"]):
            self._words = self._store.get(f"{RankState.attempt}/words").decode()
            self._heard = self._clock.seconds
        return self._words

    def ended_elsewhere(self) -> str | None:
        """Describe a rank that has ended, if this one does not notice by itself."""
        waited = self._clock.seconds - self._heard
        return self._words if self.words() and waited > _WORDS_SECONDS else None

    def silent_next(self, timeout: float) -> str | None:
        """Describe the next rank if it has been silent for longer than `timeout`."""
        now = self._clock()
        neighbour = (self._rank + 1) % self._world
        beat = self._beat_of(neighbour)
        count = beat["count"] if beat else 0
        if count != self._seen[0] or (beat and beat["phase"] == ENDED):
            self._seen = (count, now)
        if now - self._seen[1] <= timeout:
            return None
        return self._describe(neighbour, beat)

    def missing(self) -> str | None:
        """Describe ranks that are gone, stopped or silent, after a lost connection."""
        before = {rank: self._beat_of(rank) for rank in range(self._world) if rank != self._rank}
        known: dict[int, dict[str, Any] | None] = {
            rank: beat
            for rank, beat in before.items()
            if beat
            and beat["machine"] == machine()
            and state_of(beat["pid"]) not in (None, ON_DISK)
        }
        if not known:
            time.sleep(2 * self._interval + 1)
            known = {rank: beat for rank, beat in before.items() if beat == self._beat_of(rank)}
        return listed([self._describe(*rank) for rank in known.items()], 4) or None

    def without_store(self) -> tuple[str, bool]:
        """Describe rank 0 if its store is gone, and whether rank 0 has ended."""
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        if self._holder and self._holder["machine"] == machine():
            return self._describe(0, self._holder), state_of(self._holder["pid"]) == HAS_ENDED
        rank = "rank 0 on {host}, process {pid}," if self._holder else "rank 0"
        text = rank.format_map(self._holder or {})
        ended = False
        try:
            socket.create_connection((address, int(port)), _LEAVE_SECONDS).close()
            text += " does not respond"
        except ConnectionRefusedError:
            text, ended = f"{text} has ended: see its log, or dmesg there", True
        except OSError as error:
            text += f" cannot be reached ({error.strerror or error}): look at its host and network"
        return f"{text}; the ranks' store ran there, at {address}:{port}", ended

    def where(self) -> str:
        """Describe the state of the first 8 ranks, in one line."""
        beats = ((rank, self._beat_of(rank)) for rank in range(min(self._world, 8)))
        return ", ".join(f"rank {rank} {_place(beat)}" for rank, beat in beats if beat)

    def first_here(self) -> bool:
        """Return whether this rank is the first of its host and attempt to report an error."""
        return bool(self._store.add(f"{RankState.attempt}/said on {node()}", 1) == 1)

    def _beat_of(self, rank: int) -> dict[str, Any] | None:
        if not self._store.check([str(rank)]):
            return None
        return dict(json.loads(self._store.get(str(rank))))

    def _describe(self, rank: int, beat: dict[str, Any] | None) -> str:
        if beat is None:
            return f"rank {rank} never reported: did it start?"
        state = state_of(beat["pid"]) if beat["machine"] == machine() else None
        ago = max(0.0, time.time() - beat["time"])
        text = f"rank {rank} (process {beat['pid']} on {beat['host']})"
        if state == HAS_ENDED:
            return f"{text} has ended, last seen {_place(beat)}: see its log, or dmesg"
        text += f" has not responded for {ago:.0f} s, last seen {_place(beat)}"
        return f"{text}: it {state}" if state else text


_heart: Heartbeat | None = None
_thread: threading.Thread | None = None
_explaining = False  # the main thread has an error, and reports it or leaves that to another rank
_leaving = threading.Event()


def start() -> None:
    """Start the heartbeat thread, if there is more than one rank. Imports torch."""
    global _thread
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _thread = threading.Thread(target=_live, name="heartbeat", daemon=True)
        _thread.start()


def _live() -> None:
    global _heart
    # If torchrun does not host the store, rank 0 opens it where the ranks meet.
    while os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and not RankState.attempt:
        if _leaving.wait(0.2):
            return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _heart = heart = Heartbeat(_connect(), rank, world, max(SECONDS, world / 200))
    silent, clock = 0.0, Clock(heart._interval)
    # A call to an unreachable store blocks for a minute, which `clock` mistakes for a stop of this
    # process; the guard's clock goes on.
    answer = f"an answer from {os.environ['MASTER_ADDR']}, which runs the ranks' store"
    answer += f" (is {here()} cut off from it?),"
    while not _leaving.is_set():
        try:
            with guard.bounded(answer):
                heart.beat()
                text = heart.silent_next(guard.timeout) or heart.ended_elsewhere()
                if text and not _explaining and not heart.first_here():
                    time.sleep(1.0)  # the other rank is reporting it
                    os._exit(2)
            if text and not _explaining:
                waits = under_way()
                end(f"{text}; rank {rank} is waiting in {waits}" if waits else text)
            silent = clock()
        except RuntimeError:  # from torch: the store does not respond
            text, ended = heart.without_store()
            waited = clock() - silent
            # A finished rank may outlive the store.
            soon = ended and RankState.phase not in ("ending", ENDED) and waited > _WORDS_SECONDS
            if (soon or waited > guard.timeout) and not _explaining:
                end(text)
        _leaving.wait(heart._interval)


def _connect() -> Any:
    import torch.distributed as dist

    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    # For all attempts: a beat of an earlier one is overwritten, or shows the end of its rank.
    return dist.PrefixStore("megasink/beats", store)


def farewell() -> bool:
    """Announce that this rank is done, and end its thread; return whether the thread has ended."""
    # A thread inside the store at exit would abort the process.
    RankState.phase = ENDED
    _leaving.set()
    if _thread is None:
        return True
    _thread.join(_LEAVE_SECONDS)
    if _thread.is_alive():
        return False
    _asked(Heartbeat.beat, None)
    return True


def first_to_speak() -> bool:
    """Return whether this rank reports why the run ends: the first of its host with an error."""
    global _explaining
    _explaining = True
    until(lambda: _heart or not (_thread and RankState.attempt), _LEAVE_SECONDS)
    if _heart is None:  # the ranks have not met: all fail alike
        return is_first_here()
    return _asked(Heartbeat.first_here, True)


def tell(words: str) -> None:
    """Let the other ranks know why this one ends."""
    _asked(lambda heart: heart.tell(words), None)


def linger() -> None:
    """Let other hosts read why the ranks end: the store may end with this one."""
    if _heart is not None and os.environ["RANK"] == "0" and on_several_hosts():
        time.sleep(2 * _heart._interval + 1)


def words() -> str:
    """Return why another rank ended; waits a moment for it. Empty if nothing is known."""
    if _heart is not None:  # what its thread has heard is kept
        until(lambda: _asked(Heartbeat.words, "") or (_heart and _heart._words), 2 * SECONDS)
    return _heart._words if _heart else ""


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a torch error means that another rank could not be reached."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(_LOST.search(str(cause)) for cause in seen)


def missing_ranks() -> str | None:
    """Describe ranks that are gone, stopped or silent; None if all respond or nothing is known."""
    return _asked(Heartbeat.missing, None, gone=lambda heart: heart.without_store()[0])


def where() -> str:
    """Describe the state of every rank; empty if nothing is known."""
    return _asked(Heartbeat.where, "")


def _asked[T](
    question: Callable[[Heartbeat], T], unknown: T, gone: Callable[[Heartbeat], T] | None = None
) -> T:
    """Return the answer of the heartbeat; `unknown` without one, or without the ranks' store."""
    if _heart is None:
        return unknown
    try:
        return question(_heart)
    except RuntimeError:
        return gone(_heart) if gone else unknown


def _place(beat: dict[str, Any]) -> str:
    step = f"after step {beat['step']}, " if beat["step"] is not None else ""
    collective = f", in {beat['collective']}" if beat.get("collective") else ""
    return f"{step}{beat['phase']}{collective}"
