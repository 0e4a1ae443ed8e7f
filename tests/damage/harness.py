"""Puts damaged inputs through the real commands, each in a process of its own, and judges them.

A case is refused with one line (or one numbered list) and exit code 2, or accepted with 0; no
traceback, no more than 2 GB of memory in any process, no more than its time; inputs are unchanged
and nothing half-written is left. Processes are forked from one that has imported everything.
"""

import hashlib
import os
import re
import resource
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_BYTES = 2 << 30
SECONDS = 600
"""Of one input. Only a hang takes so long, on a busy machine too."""


@dataclass(frozen=True)
class Sound:
    """Sound inputs, to be damaged copies of; `large` asks for bombs of gigabytes."""

    root: Path
    large: bool = False

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def data(self) -> Path:
        return self.root / "data" / "text"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def hf(self) -> Path:
        return self.root / "llama"

    @property
    def analysis(self) -> Path:
        return self.root / "analysis"

    @property
    def other(self) -> Path:
        return self.root / "other"

    @property
    def run2(self) -> Path:
        return self.root / "run2"

    def unfinished(self, command: str) -> Path:
        """The output of a command that ended before its results were written."""
        return self.root / "unfinished" / command


@dataclass(frozen=True)
class Case:
    """A damaged input.

    Attributes:
        make: writes it into a folder, and gives the command line; `{out}` in it is the output.
        code: the exit code it must end with; None for 0 or 2, as its reader decides.
        says: what must stand in the message.
        writes: the command goes on with what it is given, a run that is resumed.
    """

    make: Callable[[Path, Sound], Sequence[str]]
    code: int | None = 2
    says: str = ""
    writes: bool = False


@dataclass
class Outcome:
    """What became of a case; `wrong` is empty where all is as it must be."""

    name: str
    code: int
    seconds: float
    rss_bytes: int
    message: str
    wrong: list[str]


def judge(name: str, case: Case, folder: Path, sound: Sound) -> Outcome:
    """Make the input, run the command in a forked process, and look at what it left."""
    inputs, output = folder / "in", folder / "out"
    inputs.mkdir(parents=True)
    argv = [str(a).replace("{out}", str(output)) for a in case.make(inputs, sound)]
    before = _state(inputs)
    log = folder / "stderr.log"
    start = time.monotonic()
    code, rss = forked(argv, log, folder / "stdout.log")
    seconds = time.monotonic() - start
    said = log.read_text(errors="backslashreplace")
    message = said.rpartition("megasink: error: ")[2].strip() if code == 2 else ""
    wrong = []
    if code not in ((0, 2) if case.code is None else (case.code,)):
        wrong.append(f"exit code {code}, not {case.code}: {said[-1500:]}")
    if "Traceback" in said or "Traceback" in (folder / "stdout.log").read_text(errors="replace"):
        wrong.append("a traceback")
    if code == 2:
        wrong += _message_problems(said, message, case.says)
        wrong += [f"left {p}" for p in sorted(output.rglob("*")) if not _allowed(p, output)]
    wrong += [f"left {p}" for p in folder.rglob("*") if p.suffix in (".partial", ".lock")]
    if rss > LIMIT_BYTES:
        wrong.append(f"{rss / 1e9:.1f} GB of memory")
    if not case.writes and _state(inputs) != before:
        wrong.append("the input was changed")
    return Outcome(name, code, seconds, rss, message, wrong)


def _message_problems(said: str, message: str, says: str) -> list[str]:
    wrong = []
    if "megasink: error: " not in said:
        return ["no line of ours"]
    lines = message.splitlines()
    if len(lines) > 1 and not all(re.match(r"  \d+\. ", line) for line in lines[1:]):
        wrong.append(f"more than a line: {lines}")
    if any(len(line) > 1200 for line in lines):
        wrong.append(f"a line of {max(map(len, lines))} characters")
    if says not in message:
        wrong.append(f"{says!r} is not in: {message}")
    return wrong


def _allowed(path: Path, output: Path) -> bool:
    """Empty folders above an output; a trained tokenizer, and sample indices, which are whole."""
    whole = path.parent.name.endswith("-tokenizer") or "-TextDataset-" in path.name
    return path.is_dir() or whole


def _state(folder: Path) -> dict[str, str]:
    """Name and content of everything in a folder, files of gigabytes by their size."""
    found = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        name = os.fsencode(path.relative_to(folder)).hex()
        found[name] = f"{stat.S_IFMT(facts.st_mode)} {facts.st_size}"
        if stat.S_ISREG(facts.st_mode) and facts.st_size < 64 << 20 and os.access(path, os.R_OK):
            found[name] += hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def show(line: str, wrong: Sequence[str]) -> None:
    """Print the line of a case, and what is wrong with it."""
    for text in (f"{'WRONG' if wrong else 'ok':5} {line}", *(f"      {one}" for one in wrong)):
        print(text, flush=True)


def forked(argv: Sequence[str], log: Path, out: Path) -> tuple[int, int]:
    """Exit code and largest resident set of a command and of what it starts; -9 for a hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _become(argv, log, out)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.alarm(SECONDS)
    try:
        _, status, usage = os.wait4(child, 0)
    finally:
        signal.alarm(0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss << 10


def _become(argv: Sequence[str], log: Path, out: Path) -> None:
    """The command, in the process that was forked for it; never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        for path, number in ((out, 1), (log, 2)):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["megasink", *argv]
        if argv[0] == "rank":
            from megasink.training.pretrain import main

            code = main(argv[1:])
        else:
            from megasink.cli import main as command

            code = command(argv)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
