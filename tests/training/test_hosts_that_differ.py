"""Two hosts that are not alike, or of which one is missing: named within a minute, on each host
that can know it, before the first step; and hosts that are alike train."""

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from tests.distributed.pool import ROOT
from tests.forkserver import HANG_SECONDS
from tests.runs import TINY, UNTIED, records, steps
from tests.training.hosts import lacking, two_hosts

SECONDS = 60
FLAGS = [*TINY, *UNTIED, *"--split 80,20,0 --eval-iters 1 --num-workers 0 --train-iters 1".split()]


@dataclass
class Fault:
    """What is different on host B.

    Attributes:
        named: what a line of every host in `on` says.
        on: the hosts that can know it.
        flags: of host B, behind those of both.
        both: flags of both hosts.
        variables: of host B.
        setup: shell commands on host B, whose mounts are its own.
        first: the same on host A.
        start: the hosts that are started.
        rc: exit codes, those of `start`; None of a host that waits for others for minutes.
        may_be_right: whether the hosts may train in spite of it, together.
    """

    named: str
    on: str = "ab"
    flags: Sequence[str] = ()
    both: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    first: str = ""
    start: str = "ab"
    rc: Sequence[int | None] = (1, 1)
    may_be_right: bool = False


CLOCK = """
import sys
if "megasink.training.meeting" in sys.orig_argv:
    from datetime import datetime, timedelta
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    class Ahead(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(zone) + timedelta(seconds=60)
    dynamic_rendezvous.datetime = Ahead
"""
FULL_SHM = "mount -o remount,size=64k /dev/shm; head -c 65536 /dev/zero > /dev/shm/x || true"
FAULTS = {
    "run folder not shared": Fault(
        r"host-b: --run-dir \S+ is another folder than on host-a",
        setup="mount -t tmpfs tmpfs {shared}; mkdir {run}",
    ),
    "learning rate": Fault(
        r"host-b: --lr 0\.01 \(host-a: 0\.001\)", flags=["--lr", "1e-2", "--min-lr", "0"]
    ),
    "data missing": Fault(r"--data-path \S+", setup="mount --bind /dev/null {data}.idx"),
    "ranks of a host": Fault(
        r"3 ranks have met, but .* make [24]", variables={"RANKS_PER_NODE": "2"}
    ),
    # torchrun takes the other host for dead, or not: as they happen to write and read.
    "clocks a minute apart": Fault(
        r"1 rank has met, but NNODES x RANKS_PER_NODE make 2.* clocks",
        variables={"PYTHONPATH": "{own}:" + str(ROOT)},
        setup=f"cat > {{own}}/sitecustomize.py <<'E'{CLOCK}E",
        may_be_right=True,
    ),
    "number of hosts": Fault(r"host-. has NNODES=[23], host-", variables={"NNODES": "3"}),
    "host B missing": Fault(
        r"host-a has waited \d+ s for 1 of 2 hosts .*here: host-a", on="a", start="a", rc=(None,)
    ),
    "host A missing": Fault(
        r"host-b has waited \d+ s for 10\.77\.0\.1", on="b", start="b", rc=(1,)
    ),
    "port taken": Fault(
        r"MASTER_PORT 29500 .*in use|10\.77\.0\.1:29500",
        first="python3 -m http.server 29500 >/dev/null 2>&1 & sleep 1",
        rc=(1, None),
    ),
    "wrong MASTER_ADDR": Fault(
        r"host-b has waited \d+ s for 10\.77\.0\.9|host-a has waited \d+ s for 1 of 2 hosts",
        variables={"MASTER_ADDR": "10.77.0.9"},
        rc=(None, 1),
    ),
    "no cable": Fault(
        r"MASTER_ADDR 10\.77\.0\.1: there is no route|host-a has waited \d+ s for 1 of 2 hosts",
        setup="ip link set eth7 down",
        rc=(None, 2),
    ),
    "full /dev/shm": Fault(
        r"No space left|bus error|shared memory", both=["--num-workers", "1"], setup=FULL_SHM
    ),
    "error before the hosts meet": Fault(r"broken cable", variables={"FAULT": "early"}),
    "error while the model is built": Fault(
        r"broken cable",
        variables={"FAULT": "late"},
    ),
    "killed": Fault(
        r"host-b.* (ended|killed|SIGKILL)|rank 1 .*(killed|SIGKILL)", variables={"FAULT": "killed"}
    ),
    "stopped at its start": Fault(
        r"host-a has waited \d+ s for the other ranks of 2 to start",
        on="a",
        variables={"FAULT": "stopped"},
        rc=(None, None),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def possible():
    if reason := lacking():
        pytest.skip(reason)


class Pair:
    """Host A and host B, and one command for both."""

    def __init__(self, hosts, tmp, text):
        self.hosts = dict(zip("ab", hosts, strict=True))
        self.tmp, self.run = tmp, tmp / "shared" / "run"
        self.names = {"tmp": tmp, "run": self.run, "shared": tmp / "shared"}
        self.names |= {"data": text[1], "own": tmp / "own"}
        for folder in ("shared", "own", "cache", "board"):
            (tmp / folder).mkdir()
        (tmp / "tiny.toml").write_text("train-iters = 1\n")
        script = str(ROOT / "examples" / "pretrain_gpt_sink.sh")
        self._line = ["bash", script, "--recipe", str(tmp / "tiny.toml"), *FLAGS, *text]
        self._line += ["--plugin", "tests.training.host_plugin"]
        self._variables = {"NNODES": "2", "RANKS_PER_NODE": "1", "RUN_DIR": str(self.run)}
        self._variables |= {"MASTER_ADDR": hosts[0].address, "PYTHON": sys.executable}
        self.logs, self.processes = {}, {}

    def start(self, letter, flags, variables, setup):
        def filled(word):
            for name, value in self.names.items():
                word = word.replace(f"{{{name}}}", str(value))
            return word

        self.logs[letter] = self.tmp / f"{letter}.log"
        line = [*self._line, *map(filled, flags)]
        given = self._variables | {name: filled(value) for name, value in variables.items()}
        self.processes[letter] = self.hosts[letter].start(
            line, self.logs[letter], given, filled(setup)
        )

    def said(self, letter):
        return self.logs[letter].read_text(errors="replace")


@pytest.fixture
def pair(tmp_path, text):
    with two_hosts(tmp_path) as hosts:
        yield Pair(hosts, tmp_path, text)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_on_the_hosts_that_can_know_it(name, pair):
    fault = FAULTS[name]
    began, named = time.monotonic(), {}
    if "a" in fault.start:
        pair.start("a", fault.both, {}, fault.first)
    if "b" in fault.start:
        pair.start("b", [*fault.both, *fault.flags], fault.variables, fault.setup)
    line = re.compile(rf"^(?:\[\S+\]:)?.*(?:megasink: |Error: ).*(?:{fault.named})", re.M)
    # Of a machine with nothing else to do.
    running, limit = True, SECONDS * max(1.0, os.getloadavg()[0] / os.cpu_count())
    while running and len(named) < len(fault.on) and time.monotonic() - began < limit:
        running = any(process.poll() is None for process in pair.processes.values())
        for letter in set(fault.on) - set(named):
            if line.search(pair.said(letter)):
                named[letter] = round(time.monotonic() - began, 1)
        time.sleep(0.1)
    codes = []
    for process, code in zip(pair.processes.values(), fault.rc, strict=True):
        if code is not None and set(named) == set(fault.on):
            process.wait(HANG_SECONDS)
        codes.append(process.poll())
    lines = {letter: (line.search(pair.said(letter)) or [""])[0] for letter in pair.processes}
    print(f"FAULT {name}: named after {named}, exit codes {codes}: {lines}")
    if fault.may_be_right and codes == [0, 0]:
        assert [record["world_size"] for record in records(pair.run / "starts.jsonl")] == [2]
        return
    assert set(named) == set(fault.on), "\n".join(map(pair.said, pair.processes))
    assert codes == list(fault.rc)
    assert not (pair.run / "metrics.jsonl").exists()


def test_hosts_that_are_alike_train(pair):
    for letter in "ab":
        pair.start(letter, [], {}, "")
    assert [p.wait(HANG_SECONDS) for p in pair.processes.values()] == [0, 0], pair.said("a")
    assert len(steps(pair.run)) == 1
