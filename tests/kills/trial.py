"""One kill: what of a run ends when something of it is killed, and what is left."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.forkserver import ForkServer, Process
from tests.kills.configurations import MODEL, STEPS, Configuration

KINDS = (
    "SIGKILL rank",
    "SIGKILL launcher",
    "SIGKILL torchrun",
    "SIGTERM launcher",
    "SIGINT terminal",
    "SIGSTOP rank",
    "SIGKILL helper",
)
START_SECONDS, ORPHAN_SECONDS = 400.0, 10.0
# A checkpoint, torchrun's patience with a rank that does not end, a slow machine.
END_SECONDS = 150.0


@dataclass
class Outcome:
    """What one kill did.

    Attributes:
        lost: a checkpoint that was whole was not gone on from, or a step that was to be saved.
        hung: something was still there after END_SECONDS.
        orphans: processes left ORPHAN_SECONDS after the launcher had ended.
        unequal: steps whose metrics are not those of the run that never stopped, to the bit.
        said: the launcher's last line.
    """

    configuration: str
    kind: str
    step: int
    seconds: float = 0.0
    code: int | None = None
    lost: bool = False
    hung: bool = False
    orphans: int = 0
    unequal: int = 0
    said: str = ""
    problems: list[str] = field(default_factory=list)


def steps(run: Path) -> dict[int, tuple[object, ...]]:
    """{step: what must be equal} of metrics.jsonl; a line cut short is left out."""
    found = {}
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, KeyError):
            record = json.loads(line)
            values = (record["lm_loss"], record["balance_loss"], record["grad_norm"])
            found[record["iteration"]] = (*values, record["consumed_samples"])
    return found


def newest(run: Path) -> int:
    """The step of the newest finished checkpoint; 0 without one."""
    tracker = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    with contextlib.suppress(OSError, ValueError):
        return int(tracker.read_text())
    return 0


class Run:
    """A run that is killed again and again, and resumed each time by the documented command."""

    def __init__(self, nursery: ForkServer, configuration: Configuration, folder: Path, auto: bool):
        self._nursery, self.configuration, self._auto = nursery, configuration, auto
        self.folder = folder
        self._starts = 0

    def start(self) -> Process:
        """Start or resume: the launcher."""
        flags = [*MODEL, *self.configuration.flags, "--ranks", str(self.configuration.ranks)]
        if self._auto:
            flags += ["--resume", "auto"]
        elif newest(self.folder):
            flags = ["--ranks", str(self.configuration.ranks), "--resume"]
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._starts += 1
        argv = ["megasink", "train", "--run-dir", str(self.folder), *flags]
        files = {name: self._output(name) for name in ("stdout", "stderr")}
        return self._nursery.start(argv, tree=True, **files)

    def to_the_end(self) -> int | None:
        """Let it run: the exit code."""
        return self.start().wait(START_SECONDS)

    def begin_anew(self) -> None:
        """In another folder, from step 0."""
        self.folder = self.folder.with_name(f"{self.folder.name}+")

    def said(self) -> str:
        """The last line on the error stream."""
        lines = self._output("stderr").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def kill(self, kind: str, generator: random.Random) -> Outcome:
        """Start, kill at a random moment, wait until all has ended."""
        whole, opened = newest(self.folder), self._changed()
        launcher = self.start()
        aim = whole + generator.randint(1, max(1, min(35, STEPS - 5 - whole)))
        in_start = generator.random() < 0.2 and "helper" not in kind
        outcome = Outcome(self.configuration.name, kind, 0 if in_start else aim)
        if in_start:
            time.sleep(generator.random() * 5)
            self._do(kind, launcher.pid, generator)
        elif not self._reach(aim):
            outcome.problems.append("did not start or resume")
            outcome.lost = True
        else:
            time.sleep(generator.random() * 0.5)
            self._do(kind, launcher.pid, generator)
        told_at = time.monotonic()
        outcome.code = launcher.wait(END_SECONDS)
        outcome.seconds = round(time.monotonic() - told_at, 1)
        outcome.hung = outcome.code is None
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (orphans := self._nursery.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        outcome.orphans = 0 if outcome.hung else len(orphans)
        for process in orphans:
            outcome.problems.append(f"left: {process.pid} {process.name()}")
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if outcome.hung:
            launcher.wait(30)
        outcome.said = self.said()
        self._judge(outcome, whole, self._changed() != opened)
        return outcome

    def _judge(self, outcome: Outcome, whole: int, wrote: bool) -> None:
        """Args: wrote: Whether this start wrote steps; others are of one that was killed."""
        if newest(self.folder) < whole:
            outcome.lost = True
            outcome.problems.append(f"step {whole} was whole, now {newest(self.folder)}")
        told = outcome.kind in ("SIGTERM launcher", "SIGINT terminal")
        last = max(steps(self.folder), default=0)
        if told and wrote and outcome.code != 0 and newest(self.folder) < last:
            outcome.lost = True
            outcome.problems.append(f"told to end after step {last}, saved {newest(self.folder)}")
        single_line = re.match(r"megasink: ", outcome.said)
        if outcome.code not in (0, -signal.SIGKILL) and not single_line:
            outcome.problems.append("no line of its own")

    def _reach(self, aim: int) -> bool:
        """Wait until this start has logged a step."""
        deadline, opened = time.monotonic() + START_SECONDS, self._changed()
        while time.monotonic() < deadline and self._nursery.left():
            # Lines of steps that are run again go when the file is opened.
            if self._changed() != opened and max(steps(self.folder), default=0) >= aim:
                return True
            time.sleep(0.02)
        return False

    def _changed(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.stat().st_mtime_ns if path.is_file() else 0

    def _ranks(self, launcher: int) -> list[psutil.Process]:
        torchrun = psutil.Process(launcher).children()
        children = torchrun[0].children() if torchrun else []
        return [child for child in children if os.getsid(child.pid) == child.pid]

    def _do(self, kind: str, launcher: int, generator: random.Random) -> None:
        """Kill it, if it is there: in a start there may be no rank yet."""
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, IndexError):
            self._send(kind, launcher, generator)

    def _send(self, kind: str, launcher: int, generator: random.Random) -> None:
        what, _, target = kind.partition(" ")
        number = signal.Signals[what]
        if target == "terminal":
            os.killpg(launcher, number)
        elif target == "launcher":
            os.kill(launcher, number)
        elif target == "torchrun":
            psutil.Process(launcher).children()[0].send_signal(number)
        else:
            process = generator.choice(self._ranks(launcher))
            if target == "helper":  # the writer, its own helper, a data loader's worker
                process = generator.choice(process.children())
            process.send_signal(number)

    def _output(self, name: str) -> Path:
        return self.folder.parent / f"{self.folder.name}-{self._starts}.{name}"
