"""Hosts that do not meet, and ranks and hosts that die."""

from tests.hosts.case import Case

CLOCK = """cat > {own}/sitecustomize.py <<'E'
import sys
if "megasink.training.multi_host_torchrun" in sys.orig_argv:
    import time
    now = time.time
    time.time = lambda: now() + SECONDS
    from datetime import datetime, timedelta
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    class Other(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(zone) + timedelta(seconds=SECONDS)
    dynamic_rendezvous.datetime = Other
E"""
# Or torchrun is faster.
CLOCKS = r"the clock of host-. differs by [+-]\d\d s from that of host-|met, but .* clocks with NTP"
OWN_PATH = {"PYTHONPATH": "{own}:{root}"}
FULL_SHM = "mount -o remount,size=64k /dev/shm; head -c 65536 /dev/zero > /dev/shm/x || true"
ALIKE = "hostname twin"
WAITS = r"host-{} has waited \d+ s for "
GONE = r"rank 0 on host-a, process \d+, has ended|host-a: rank 0 (ended|was killed)|"
GONE += r"host-a with rank 0 has ended|rank 0 \(process \d+ on host-a\) has ended"
MINUTE = ["--distributed-timeout-minutes", "1"]
LONG = ["--train-iters", "100000"]
MEETING = {
    "ranks of a host": Case(r"3 ranks have met, but .* is [24]", variables={"RANKS_PER_NODE": "2"}),
    "number of hosts": Case(r"host-. has NNODES=[23], but host-", variables={"NNODES": "3"}),
    "a clock 40 s ahead": Case(
        CLOCKS,
        variables=OWN_PATH,
        setup=CLOCK.replace("SECONDS", "40"),
    ),
    "a clock 40 s behind": Case(
        CLOCKS,
        variables=OWN_PATH,
        setup=CLOCK.replace("SECONDS", "-40"),
    ),
    "a clock a minute ahead, on C": Case(
        CLOCKS,
        "abc",
        3,
        variables=OWN_PATH,
        setup=CLOCK.replace("SECONDS", "60"),
        of="c",
    ),
    "a clock 5 s ahead": Case(variables=OWN_PATH, setup=CLOCK.replace("SECONDS", "5")),
    "another RUN_DIR": Case(
        r"host-. has the run \S+, but host-. has \S+ at 10\.77\.0\.1:29500",
        variables={"RUN_DIR": "{shared}/another"},
        codes={"a": None},
    ),
    "host B missing": Case(
        WAITS.format("a") + r"1 of 2 hosts .*here: host-a", "a", start="a", codes={"a": None}
    ),
    "host C missing": Case(
        WAITS.format("[ab]") + r"1 of 3 hosts .*here: host-a, host-b",
        "ab",
        3,
        start="ab",
        codes={"a": None, "b": None},
        of="c",
    ),
    "host A missing": Case(WAITS.format("b") + r"10\.77\.0\.1", "b", start="b"),
    "port taken": Case(
        r"10\.77\.0\.1:29500",
        of="a",
        setup="python3 -m http.server 29500 >/dev/null 2>&1 & "
        "until (echo > /dev/tcp/127.0.0.1/29500) 2>/dev/null; do sleep 0.1; done",
        codes={"a": None, "b": None},
    ),
    "wrong MASTER_ADDR": Case(
        WAITS.format("b") + r"10\.77\.0\.9|" + WAITS.format("a") + "1 of 2 hosts",
        variables={"MASTER_ADDR": "10.77.0.9"},
        codes={"a": None},
    ),
    "no cable": Case(
        r"MASTER_ADDR 10\.77\.0\.1: this host has no route|" + WAITS.format("a") + "1 of 2 hosts",
        setup="ip link set eth7 down",
        codes={"a": None},
    ),
    "closed ports": Case(
        WAITS.format("a") + "the other ranks|" + WAITS.format("b") + r"rank 0, .* all TCP ports",
        of="a",
        setup="ip rule add pref 100 lookup local; ip rule del pref 0; "
        "ip rule add iif eth7 ipproto tcp dport 29501-65534 blackhole pref 1",
        codes={"a": None, "b": None},
    ),
    "a smaller MTU in the switch": Case(
        r"a long message between host-a and host-b.* same MTU", before="small-mtu"
    ),
    "another MTU of one host": Case(setup="ip link set eth7 mtu 1000"),
    "hosts of one name": Case(first=ALIKE),
    "hosts of one name, learning rate": Case(
        r"twin \(10\.77\.0\.2\): --lr 0\.01 \(twin \(10\.77\.0\.1\): 0\.001\)",
        first=ALIKE,
        flags=["--lr", "1e-2"],
    ),
    "hosts of one name, one missing": Case(
        r"twin has waited \d+ s for 1 of 2 hosts",
        "a",
        first=ALIKE,
        start="a",
        codes={"a": None},
    ),
    "hosts of one name, an error on B": Case(
        r"twin.*broken cable", first=ALIKE, variables={"FAULT": "late"}
    ),
    "hosts of one name, B's rank killed": Case(
        r"rank 1.*twin.*(has ended|SIGKILL)|twin.*: rank 1 .*SIGKILL",
        first=ALIKE,
        all=LONG,
        at="SIGKILL rank 1",
    ),
    "a second job on the port": Case(hosts=2, at="second job", all=["--train-iters", "40"]),
}
DEATHS = {
    "rank 0 SIGKILL": Case(GONE, all=LONG, at="SIGKILL rank 0"),
    "rank 0 SIGSEGV": Case(GONE, all=LONG, at="SIGSEGV rank 0"),
    "torchrun of A killed": Case(GONE + "|its parent", all=LONG, at="SIGKILL torchrun a", on="b"),
    "host A crashes": Case(GONE, "b", all=LONG, at="crash a"),
    "host A is cut off": Case(
        r"an answer from 10\.77\.0\.1|rank 0.*10\.77\.0\.1|rank 0 .*host-a",
        "b",
        all=[*LONG, *MINUTE],
        at="cut a",
        codes={"a": None, "b": None},
    ),
    "rank 1 SIGKILL": Case(
        r"rank 1 .*host-b.*(has ended|SIGKILL)|host-b: rank 1 .*SIGKILL",
        all=LONG,
        at="SIGKILL rank 1",
    ),
    "rank 1 SIGSEGV": Case(
        r"rank 1 .*host-b.*(has ended|SIGSEGV)|host-b: rank 1 .*SIGSEGV",
        all=LONG,
        at="SIGSEGV rank 1",
    ),
    "torchrun of B killed": Case(
        r"rank 1.*host-b|host-b.*rank 1", "a", all=LONG, at="SIGKILL torchrun b"
    ),
    "host B crashes": Case(r"rank 1.*host-b|host-b.*rank 1", "a", all=LONG, at="crash b"),
    "rank 0 SIGKILL, 2 ranks a host": Case(GONE, ranks=2, all=LONG, at="SIGKILL rank 0"),
    "rank 1 SIGKILL, 2 ranks a host": Case(
        r"rank 1 .*host-a.*(has ended|SIGKILL)|host-a: rank 1 .*SIGKILL",
        ranks=2,
        all=LONG,
        at="SIGKILL rank 1",
    ),
    "rank 0 SIGKILL, 3 hosts": Case(GONE, "abc", 3, all=LONG, at="SIGKILL rank 0"),
    "host A crashes, 3 hosts": Case(GONE, "bc", 3, all=LONG, at="crash a"),
    "rank 2 SIGKILL, 3 hosts": Case(
        r"rank 2 .*host-c.*(has ended|SIGKILL)|host-c: rank 2 .*SIGKILL",
        "abc",
        3,
        all=LONG,
        at="SIGKILL rank 2",
    ),
    "full /dev/shm": Case(
        r"No space left|bus error|shared memory|/dev/shm",
        all=["--num-workers", "1"],
        setup=FULL_SHM,
    ),
    "an error on B before the hosts meet": Case(r"broken cable", variables={"FAULT": "early"}),
    "an error on B while the model is built": Case(r"broken cable", variables={"FAULT": "late"}),
    "an error on A before the hosts meet": Case(
        r"broken cable", of="a", variables={"FAULT": "early"}
    ),
    "an error on A while the model is built": Case(
        r"broken cable", of="a", variables={"FAULT": "late"}
    ),
    "an error on C before the hosts meet": Case(
        r"host-c.*broken cable|broken cable", "abc", 3, of="c", variables={"FAULT": "early"}
    ),
    "killed on B while the model is built": Case(
        r"host-b.* (ended|killed|SIGKILL)|rank 1 .*(killed|SIGKILL)", variables={"FAULT": "killed"}
    ),
    "killed on A while the model is built": Case(GONE, of="a", variables={"FAULT": "killed"}),
    "stopped at its start on B": Case(
        WAITS.format("a") + "all 2 ranks to start",
        "a",
        variables={"FAULT": "stopped"},
        codes={"a": None, "b": None},
    ),
    "stopped at its start on A": Case(
        WAITS.format("b") + "rank 0",
        "b",
        of="a",
        variables={"FAULT": "stopped"},
        codes={"a": None, "b": None},
    ),
}
TRAINS = {
    "alike": Case(of=""),
    "alike, 3 hosts": Case(hosts=3, of=""),
    "alike, 2 ranks a host": Case(ranks=2, of=""),
    "alike, a resume": Case(saved=True, of=""),
}
