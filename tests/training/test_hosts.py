"""The example script on two hosts: cut off, killed and taken up again."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.distributed.pool import ROOT
from tests.forkserver import HANG_SECONDS
from tests.runs import metrics, resumed_from, steps
from tests.training.hosts import connected, lacking
from tests.training.six_steps import FLAGS
from tests.waiting import until

STEPS = 100
LONG = [*FLAGS, "--train-iters", str(STEPS), "--save-interval", "20"]
# --distributed-timeout-minutes 1: the stated limit is this, and as much again for torchrun.


@pytest.fixture(scope="module", autouse=True)
def possible():
    if reason := lacking():
        pytest.skip(reason)


def line(folder, *flags):
    """The example script, with a recipe of its own in the place of P0's."""
    recipe = folder / "tiny.toml"
    recipe.write_text("train-iters = 1\n")
    script = str(ROOT / "examples" / "pretrain_gpt_sink.sh")
    return ["bash", script, "--recipe", str(recipe), *LONG, *flags]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run on two ranks of one host."""
    folder = tmp_path_factory.mktemp("whole")
    variables = {"RANKS_PER_NODE": "2", "RUN_DIR": str(folder / "run"), "PYTHON": sys.executable}
    subprocess.run(line(folder), env={**os.environ, **variables}, check=True, capture_output=True)
    return folder / "run"


class Job:
    """The same command line on both hosts."""

    def __init__(self, hosts, folder, *flags, **variables):
        self.hosts, self.run, self.folder = hosts, folder / "run", folder
        self._line = line(folder, *flags)
        self._variables = {
            "NNODES": "2",
            "RANKS_PER_NODE": "1",
            "MASTER_ADDR": hosts[0].address,
            "RUN_DIR": str(self.run),
            "PYTHON": sys.executable,
            **variables,
        }
        self.logs, self.processes = {}, {}

    def start(self, *hosts):
        for host in hosts or self.hosts:
            self.logs[host] = self.folder / f"{host.name}-{time.monotonic_ns()}.log"
            self.processes[host] = host.start(self._line, self.logs[host], self._variables)

    def said(self, host):
        return self.logs[host].read_text(errors="replace")

    def wait_for_step(self, number):
        def reached():
            assert all(p.poll() is None for p in self.processes.values()), self.everything()
            return self.trained() >= number

        until(reached, self.everything)

    def trained(self):
        lines = metrics(self.run) if (self.run / "metrics.jsonl").is_file() else []
        return max((line["iteration"] for line in lines), default=0)

    def wait(self, *hosts):
        return [self.processes[host].wait(HANG_SECONDS) for host in hosts or self.hosts]

    def everything(self):
        return "\n".join(self.said(host)[-3000:] for host in self.hosts)


@pytest.fixture
def hosts(tmp_path):
    with connected(tmp_path) as both:
        yield both


def losses(run, number=STEPS):
    names = ("iteration", "lm_loss", "balance_loss", "grad_norm")
    return [[step[name] for name in names] for step in steps(run)][:number]


def test_a_host_that_is_cut_off_is_named_and_both_go_on(hosts, whole, tmp_path):
    job = Job(hosts, tmp_path, "--distributed-timeout-minutes", "1")
    here, there = hosts
    job.start()
    job.wait_for_step(25)
    there.disconnect()
    assert job.wait(here) == [1]
    named = re.search(r"megasink: error: (.*)", job.said(here))[1]
    assert re.search(r"rank 1 \(process \d+ on host-b\) has not responded for \d+ s", named)
    assert "last seen " in named  # where, at the last beat: steps are shorter than the beats
    assert "; resume from step 20 with" in named
    # The other one ends its ranks by itself too, and says why.
    until(lambda: "megasink: error: " in job.said(there))
    named = re.search(r"megasink: error: (.*)", job.said(there))[1]
    assert "an answer from 10.77.0.1, which runs the ranks' store (is host-b cut off" in named
    there.crash()  # torchrun is still waiting for the other one

    there.connect()
    job.start()
    assert job.wait() == [0, 0], job.everything()
    assert resumed_from(job.run) == [None, 20]
    assert losses(job.run) == losses(whole)


def test_a_host_that_comes_back_is_taken_up_again(hosts, whole, tmp_path):
    job = Job(hosts, tmp_path, MAX_RESTARTS="3")
    job.start()
    job.wait_for_step(25)
    hosts[1].crash()
    job.start(hosts[1])
    assert job.wait() == [0, 0], job.everything()
    assert resumed_from(job.run) == [None, 20]
    assert losses(job.run) == losses(whole)


def test_a_warning_to_one_host_saves_and_ends_both(hosts, whole, tmp_path):
    """SIGUSR1 to torchrun, as Slurm sends it before the time limit."""
    job = Job(hosts, tmp_path)
    job.start()
    job.wait_for_step(5)
    (torchrun,) = psutil.Process(job.processes[hosts[1]].pid).children()
    torchrun.send_signal(signal.SIGUSR1)
    assert job.wait() == [1, 1]
    last = job.trained()
    said = job.everything()
    assert (
        f"megasink: stopped by SIGUSR1 after step {last}, which is saved; resume from step" in said
    )
    assert losses(job.run) == losses(whole, last)
