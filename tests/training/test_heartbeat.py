"""Which rank does not answer, and why: the beats of ranks in a store, without the ranks."""

import json
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from megasink.training import heartbeat
from megasink.training.heartbeat import Heartbeat
from megasink.training.stop import RankState
from megasink.training.waiting import machine
from megasink.training.watchdog import Clock
from tests.distributed.pool import free_port
from tests.waiting import state, until

NOW = 1_000_000.0


@pytest.fixture(autouse=True)
def now(monkeypatch):
    """Beats are 130 s old however long this process waits for its turn; other clocks go on."""
    clock = SimpleNamespace(**vars(time) | {"time": lambda: NOW})
    monkeypatch.setattr(heartbeat, "time", clock)


class Store:
    """What is used of torch's store."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def add(self, key, number):
        self.values[key] = self.values.get(key, 0) + number
        return self.values[key]


@pytest.fixture
def sleeper():
    """A process that stands for a rank."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def tell(store, rank, pid, **others):
    beat = {"count": 1, "step": 17, "phase": "training", "host": socket.gethostname()}
    beat["machine"] = {} if "host" in others else machine()
    store.set(str(rank), json.dumps(beat | {"pid": pid, "time": NOW - 130} | others))


def test_a_stopped_rank_is_named_with_the_cause(sleeper):
    store = Store()
    beats = Heartbeat(store, 0, 2, interval=0.0)
    tell(store, 1, sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    until(
        lambda: state(sleeper.pid) == "T"
    )  # not as soon as it stops: it may wait for a disk first
    text = beats.missing()
    assert text.startswith(f"rank 1 (process {sleeper.pid} on {socket.gethostname()}) has not")
    assert "responded for 130 s, last seen after step 17, training" in text
    assert text.endswith(f"it is stopped (kill -CONT {sleeper.pid})")


def test_a_rank_that_was_killed_is_named(sleeper):
    store = Store()
    tell(store, 1, sleeper.pid)
    tell(store, 2, 1)
    sleeper.kill()
    sleeper.wait()
    text = Heartbeat(store, 0, 3, interval=0.0).missing()
    assert text.startswith(f"rank 1 (process {sleeper.pid}")
    assert "has ended, last seen after step 17" in text
    assert "rank 2" not in text


def test_a_rank_that_waits_for_a_disk_and_goes_on_is_not_named(sleeper, monkeypatch):
    """Every process that reads from one does, for a moment."""
    store = Store()
    tell(store, 1, sleeper.pid)
    tell(store, 2, sleeper.pid)
    beats = Heartbeat(store, 0, 3, interval=0.0)
    monkeypatch.setattr("psutil.Process.status", lambda process: psutil.STATUS_DISK_SLEEP)
    goes_on = lambda _: tell(store, 2, sleeper.pid, count=2)  # noqa: E731
    monkeypatch.setattr(heartbeat.time, "sleep", goes_on)
    text = beats.missing()
    assert text.startswith(f"rank 1 (process {sleeper.pid}")
    assert text.endswith("it is waiting for a disk or network file system")
    assert "rank 2" not in text


def test_whether_rank_0_has_ended_with_the_store(sleeper, monkeypatch):
    """By its process on this machine, by the port of its store on another."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    told = "the ranks' store ran there, at {MASTER_ADDR}:{MASTER_PORT}".format_map(address)
    store = Store()
    there, here = (Heartbeat(store, 1, 2) for _ in range(2))
    text, ended = there.without_store()
    assert (text, ended) == (f"rank 0 has ended: see its log, or dmesg there; {told}", True)
    tell(store, 0, 4711, host="b")
    there.beat()
    text, ended = there.without_store()
    assert text.startswith("rank 0 on b, process 4711, has ended: ")
    assert ended
    with socket.create_server(("127.0.0.1", int(address["MASTER_PORT"]))):
        text, ended = there.without_store()
    assert (text, ended) == (f"rank 0 on b, process 4711, does not respond; {told}", False)
    tell(store, 0, sleeper.pid)
    here.beat()
    text, ended = here.without_store()
    assert text.startswith(f"rank 0 (process {sleeper.pid} on {socket.gethostname()})")
    assert not ended
    sleeper.kill()
    sleeper.wait()
    text, ended = here.without_store()
    assert "has ended" in text
    assert ended


def test_of_ranks_on_other_machines_the_silent_one_is_named(monkeypatch):
    store = Store()
    tell(store, 1, 5, host="b", step=None, phase="building the data sets")
    tell(store, 2, 6, host="c")
    beats = Heartbeat(store, 0, 3, interval=0.0)
    monkeypatch.setattr(heartbeat.time, "sleep", lambda _: tell(store, 2, 6, host="c", count=2))
    text = beats.missing()
    assert text.startswith("rank 1 (process 5 on b) has not responded")
    assert text.endswith("last seen building the data sets")


def test_the_next_rank_is_silent_only_after_the_timeout_and_not_when_it_has_ended():
    store, seconds = Store(), [0.0]
    beats = Heartbeat(store, 1, 2)
    beats._clock = lambda: seconds[0]
    tell(store, 0, 1, host="b")
    assert beats.silent_next(60) is None  # heard of for the first time
    seconds[0] = 59
    assert beats.silent_next(60) is None
    seconds[0] = 61
    assert "rank 0 (process 1 on b) has not responded for 130 s" in beats.silent_next(60)
    tell(store, 0, 1, host="b", count=2)
    assert beats.silent_next(60) is None
    tell(store, 0, 1, host="b", count=2, phase="ended")
    seconds[0] = 1000
    assert beats.silent_next(60) is None


def test_a_rank_that_never_began_is_named():
    beats, seconds = Heartbeat(Store(), 0, 2), [61.0]
    beats._clock = lambda: seconds[0]
    assert beats.silent_next(60) == "rank 1 never reported: did it start?"


def test_time_in_which_this_process_was_stopped_itself_does_not_count(monkeypatch):
    times = iter([0.0, 1.0, 500.0, 501.0])
    monkeypatch.setattr("megasink.training.watchdog.time.monotonic", lambda: next(times))
    clock = Clock(tick=1.0)
    assert [clock(), clock(), clock()] == [1.0, 3.0, 4.0]


def test_beats_go_through_torchs_own_store():
    store = dist.PrefixStore("megasink/0", dist.HashStore())
    first, second = (Heartbeat(store, rank, 2) for rank in (0, 1))
    first.beat()
    second.beat()
    assert first.silent_next(0.5) is None
    assert first.where() == f"rank 0 {RankState.phase}, rank 1 {RankState.phase}"
    assert [first.first_here(), second.first_here()] == [True, False]
    assert [first.words(), second.ended_elsewhere()] == ["", None]
    second.tell("a full disk")
    first.tell("a lost connection")
    assert first.words() == f"rank 1 on {socket.gethostname()}: a full disk"
    assert first.ended_elsewhere() is None  # it may still find out by itself
    first._clock.seconds += 11
    assert first.ended_elsewhere() == first.words()


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5", True),
        ("[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:1", True),
        ("Timed out after 601 seconds waiting for clients. 1/2 clients joined.", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
        ("Error(s) in loading state_dict: the store of optimizer states", False),
    ],
)
def test_what_the_loss_of_a_rank_looks_like(text, lost):
    error = ValueError("a checkpoint")
    error.__cause__ = RuntimeError(text)
    assert heartbeat.is_lost_connection(error) is lost


# A rank that ends while its thread is in torch's store, always: the interval is 0.
ENDING = """
import os, sys, time
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
import torch.distributed as dist
from megasink.training import heartbeat
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
heartbeat.SECONDS = 1e-6
heartbeat.start()
while not heartbeat.where():
    time.sleep(0.01)
assert heartbeat.farewell()
"""


def test_a_rank_that_has_done_its_work_ends_without_an_abort():
    """Without the farewell this process aborts nearly always."""
    subprocess.run([sys.executable, "-c", ENDING, str(free_port())], check=True)


# Two ranks in two collectives: rank 1 never comes to the second, and rank 0 says so in its beat.
STUCK = """
import json, os, sys, threading, time
from megasink.training import heartbeat
from megasink.training.stop import RankState
from megasink.training.waiting import machine
heartbeat.record()
import torch, torch.distributed as dist
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group, x = dist.new_group([0, 1], group_desc="DATA_PARALLEL"), torch.ones(2, 3)
dist.all_reduce(x, group=group)
while heartbeat.under_way():  # it is noted as ended a moment later
    time.sleep(0.02)
beats = heartbeat.Heartbeat(store, rank, 2)
RankState.step, RankState.phase = 5, "training"
beats.beat()
if rank:
    while store.add("seen", 0) == 0:
        time.sleep(0.02)
else:
    waiting = threading.Thread(target=lambda: dist.all_reduce(x, group=group))
    waiting.start()
    while not (heartbeat.under_way() and store.check(["1"])):
        time.sleep(0.02)
    beats.beat()
    print(beats.where())
    store.add("seen", 1)
dist.all_reduce(x, group=group) if rank else waiting.join()
dist.destroy_process_group()
"""


def test_a_beat_names_the_collective_that_a_rank_waits_in(tmp_path):
    line = [sys.executable, "-c", STUCK]
    store = str(tmp_path / "store")
    other = subprocess.Popen([*line, "1", store])
    first = subprocess.run([*line, "0", store], capture_output=True, text=True)
    assert (first.returncode, other.wait()) == (0, 0), first.stderr
    where = "rank 0 after step 5, training, in all_reduce 2 of DATA_PARALLEL (Float [2, 3])"
    assert first.stdout.startswith(f"{where}, rank 1 after step 5, training")
