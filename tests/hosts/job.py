"""A job on several hosts with something wrong: what it says, how soon, and how it ends."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import megatron
import psutil

from megasink.cli import main
from tests import forkserver
from tests.forkserver import HANG_SECONDS, ROOT
from tests.hosts.case import Case
from tests.runs import TINY, UNTIED, records
from tests.training.hosts import Host, connected, small_packets

FLAGS = [
    *TINY,
    *UNTIED,
    *"--micro-batch-size 1 --global-batch-size 12".split(),
    *"--split 80,20,0 --eval-iters 1 --num-workers 0 --train-iters 1".split(),
]
SAVED = "--train-iters 4 --save-interval 2 --use-distributed-optimizer".split()


@dataclass
class Outcome:
    """What a case did.

    Attributes:
        named: {host: seconds until a line of it matched}.
        codes: {host: exit code}; None: it was still there.
        lines: {host: the line}.
        wrong: what is not as it should be.
    """

    name: str
    named: dict[str, float] = field(default_factory=dict)
    codes: dict[str, int | None] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Template:
    """A data set and a run with a checkpoint, which every case gets a copy of, at one path."""

    def __init__(self, folder: Path):
        self.folder, self._kept = folder / "job", folder / "kept"
        data = self.folder / "data" / "sources"
        words = ["data", str(ROOT / "megasink"), "--output", str(data), "--workers", "1"]
        assert main([*words, "--train-tokenizer", "512"]) == 0
        for name in ("own", "shared"):
            (self.folder / name).mkdir()
        (self.folder / "tiny.toml").write_text("train-iters = 1\n")
        shutil.copytree(self.folder, self._kept)
        self._has_run = False

    def new(self, *, saved: bool) -> None:
        """Restore the folder; with a run that was stopped after step 2 if `saved`."""
        if saved and not self._has_run:
            self._has_run = True
            self.new(saved=False)
            outcome = run("a run to resume", Case(all=[*SAVED, "--exit-interval", "2"]), self)
            assert not outcome.wrong, outcome
            shutil.copytree(self.folder / "shared", self._kept / "saved", symlinks=True)
        shutil.rmtree(self.folder)
        shutil.copytree(self._kept, self.folder, ignore=lambda *_: ["saved"])
        if saved:
            shutil.rmtree(self.folder / "shared")
            shutil.copytree(self._kept / "saved", self.folder / "shared")


class Job:
    """One command on several hosts."""

    def __init__(self, hosts: tuple[Host, ...], case: Case, folder: Path):
        self.hosts = dict(zip("abc", hosts, strict=False))
        self._case, self.folder = case, folder
        self.run = folder / "shared" / "run"
        self._names = {"tmp": folder, "run": self.run, "shared": folder / "shared"}
        self._names |= {"data": folder / "data" / "sources", "own": folder / "own", "root": ROOT}
        self._names |= {"tokenizer": f"{self._names['data']}-tokenizer", "python": sys.executable}
        self._names["megatron"] = Path(megatron.__path__[0])
        script = str(ROOT / "examples" / "pretrain_gpt_sink.sh")
        self._line = ["bash", script, "--recipe", str(folder / "tiny.toml"), *FLAGS]
        self._line += ["--data-path", "{data}", "--tokenizer-model", "{tokenizer}"]
        self._line += ["--plugin", "tests.training.host_plugin"]
        self._variables = {"NNODES": str(len(hosts)), "RANKS_PER_NODE": str(case.ranks)}
        self._variables |= {"MASTER_ADDR": hosts[0].address, "PYTHON": sys.executable}
        self._variables |= {"RUN_DIR": "{run}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.processes: dict[str, forkserver.Process] = {}
        self._logs: dict[str, Path] = {}

    def filled(self, text: str) -> str:
        for name, value in self._names.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text

    def start(self, letter: str, name: str = "", **variables: str) -> None:
        case, apart = self._case, letter in self._case.of
        given = (
            self._variables
            | dict(case.everywhere)
            | (dict(case.variables) if apart else {})
            | variables
        )
        words = [*self._line, *(SAVED if case.saved else ()), *case.all]
        words += case.flags if apart else ()
        setup = "; ".join(filter(None, (case.first, case.setup if apart else "")))
        key = f"{letter}{name}"
        self._logs[key] = self.folder.parent / f"{key}-{time.monotonic_ns()}.log"
        self.processes[key] = self.hosts[letter].fork(
            [self.filled(word) for word in words],
            self._logs[key],
            {name: self.filled(value) for name, value in given.items()},
            self.filled(setup),
        )

    def said(self, key: str) -> str:
        return self._logs[key].read_text(errors="replace")

    def step(self) -> int:
        metrics = self.run / "metrics.jsonl"
        text = metrics.read_text() if metrics.is_file() else ""
        return text.count('"lm_loss"')

    def act(self, what: str) -> None:
        """Do what `Case.at` says, once a step was logged."""
        wait(lambda: self.step() or not self.running())
        kind, _, whom = what.partition(" ")
        match kind:
            case "crash":
                self.hosts[whom].crash()
            case "cut":
                self.hosts[whom].disconnect()
            case "second":
                for letter in "ab":
                    self.start(letter, "2", RUN_DIR="{shared}/second")
            case _:
                self._process(whom).send_signal(signal.Signals[kind])

    def _process(self, whom: str) -> psutil.Process:
        """Return the process of "rank NUMBER" or "torchrun HOST"."""
        kind, _, which = whom.partition(" ")
        number = int(which) // self._case.ranks if kind == "rank" else "abc".index(which)
        (torchrun,) = psutil.Process(self.processes["abc"[number]].pid).children()
        if kind == "torchrun":
            return torchrun
        # Each is the leader of a session, and they are started in order.
        children = sorted(torchrun.children(), key=lambda process: process.pid)
        ranks = [process for process in children if os.getsid(process.pid) == process.pid]
        return ranks[int(which) % self._case.ranks]

    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes.values())


def wait(condition: Callable[[], object]) -> None:
    """Wait for a condition, or until only a hang can be the reason that it does not come."""
    end = time.monotonic() + HANG_SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)


def contents(folder: Path) -> dict[str, int]:
    """Return {path: size} of what a user has made: data, and what a run has saved."""
    files = (path for name in ("data", "shared", "own") for path in (folder / name).rglob("*"))
    return {str(p): p.stat().st_size for p in files if p.is_file() and "lease" not in str(p)}


@contextmanager
def job(case: Case, template: Template) -> Iterator[Job]:
    template.new(saved=case.saved)
    with connected(template.folder.parent, "abc"[: case.hosts]) as hosts:
        made = Job(hosts, case, template.folder)
        if case.before == "small-mtu":
            small_packets(hosts)
        elif case.before:
            subprocess.run(["bash", "-ec", made.filled(case.before)], check=True)
        yield made


def run(name: str, case: Case, template: Template) -> Outcome:
    """Run a case, and compare what happens with what is to happen."""
    outcome = Outcome(name)
    with job(case, template) as made:
        before, steps = contents(template.folder), made.step()
        began = time.monotonic()
        for letter in case.start or "abc"[: case.hosts]:
            made.start(letter)
        if case.at:
            made.act(case.at)
            began = time.monotonic()
        if case.at == "second job":
            _second(made, outcome)
        elif not case.named:
            wait(lambda: not made.running())
        else:
            _refused(case, made, outcome, began)
        outcome.codes = {key: process.poll() for key, process in made.processes.items()}
        outcome.lines |= {key: made.said(key)[-3000:] for key in made.processes if outcome.wrong}
        _judge(case, made, outcome, steps)
        gone = {
            path for path, size in before.items() if contents(template.folder).get(path) != size
        }
        if case.named and not case.at and gone:
            outcome.wrong.append(f"gone or changed: {gone}")
        if outcome.wrong:
            outcome.lines = {key: made.said(key)[-3000:] for key in made.processes}
    return outcome


def _second(made: Job, outcome: Outcome) -> None:
    """The second job is refused on both hosts, and the first one trains to its end."""
    began = time.monotonic()
    line = re.compile(r"^megasink: error: .*( has the run \S+|already in use|MASTER_PORT).*", re.M)
    for key in ("a2", "b2"):
        process = made.processes[key]
        process.wait(HANG_SECONDS)
        if found := line.search(made.said(key)):
            outcome.named[key] = round(time.monotonic() - began, 1)
            outcome.lines[key] = found[0]
        else:
            outcome.wrong.append(f"not named on {key}")
        if not process.poll():
            outcome.wrong.append(f"exit code of {key}: {process.poll()}")
    wait(lambda: not made.running())


def _refused(case: Case, made: Job, outcome: Outcome, began: float) -> None:
    line = re.compile(rf"^(?:\[\S+\]:)?.*(?:megasink: |Error: ).*(?:{case.named}).*", re.M)

    def named() -> bool:
        for key in set(case.on) - set(outcome.named):
            if found := line.search(made.said(key)):
                outcome.named[key] = round(time.monotonic() - began, 1)
                outcome.lines[key] = found[0][:400]
        return set(outcome.named) == set(case.on)

    wait(lambda: named() or not made.running())
    if not named() and not case.may_be_right:
        outcome.wrong.append(f"named on {sorted(outcome.named)}, not on {case.on}")
        return
    ending = [p for key, p in made.processes.items() if case.codes.get(key, 1) is not None]
    wait(lambda: all(p.poll() is not None for p in ending))


def _judge(case: Case, made: Job, outcome: Outcome, steps: int) -> None:
    for key, code in outcome.codes.items():
        expected = case.codes.get(key, "not 0" if case.named else 0)
        if expected is None or key.endswith("2"):
            continue
        if code is None or bool(code) is not bool(expected):
            outcome.wrong.append(f"exit code of {key}: {code}, not {expected}")
    if case.named and not case.at and made.step() != steps:
        outcome.wrong.append(f"{made.step() - steps} steps were trained")
    if not case.named and not made.step():
        outcome.wrong.append("no step was trained")
    if not case.named:
        starts = made.run / "starts.jsonl"
        worlds = [start["world_size"] for start in records(starts)] if starts.is_file() else []
        if worlds[-1:] != [case.hosts * case.ranks]:
            outcome.wrong.append(f"{worlds} ranks have trained")
