"""Runs commands while the machine fails them, each in a process of its own, and judges the ends.

A command that fails says one line (or one numbered list), exits with a code, leaves nothing
half-written and no traceback. Where the failure does not meet it, it succeeds. Processes are forked
from one that has imported everything.
"""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 600
MIB = 1 << 20


@dataclass(frozen=True)
class Fault:
    """One failure of the machine.

    Attributes:
        name: of the kind, and how much of it.
        volume: bytes of the file system that the output is on; a share of what the command
            needs if at most 1; None for no file system of its own.
        read_only: whether that is mounted read-only.
        inside: done in the process before the command begins.
        environment: for tests/faults/failing.c; BELOW is the folder of the output or the inputs.
        stdout: "closed" or a path, for the output of the command.
    """

    name: str
    volume: float | None = None
    read_only: bool = False
    inside: Callable[[], None] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    stdout: str = ""


def _handles(more: int) -> Callable[[], None]:
    def limit() -> None:
        most = 1 + max(int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists())
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + more,) * 2)

    return limit


def _memory(kind: int, line: str, mib: int) -> Callable[[], None]:
    def limit() -> None:
        status = Path("/proc/self/status").read_text()
        used = int(re.search(rf"{line}:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]
        resource.setrlimit(kind, (used + mib * MIB,) * 2)

    return limit


def _file_size(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _fails(calls: str, number: int, after: int, below: str) -> dict[str, str]:
    return {
        "FAIL_CALLS": calls,
        "FAIL_ERRNO": str(number),
        "FAIL_AFTER": str(after),
        "FAIL_BELOW": below,
    }


FAULTS = {
    fault.name: fault
    for fault in (
        *(Fault(f"full-{share:g}", volume=share) for share in (0.05, 0.3, 0.6, 0.9)),
        *(Fault(f"file-size-{n}", inside=_file_size(n)) for n in (0, 700, 20_000)),
        *(
            Fault(f"quota-{n}", environment=_fails("write", errno.EDQUOT, n, "OUT"))
            for n in (0, 3000, 60_000)
        ),
        *(
            Fault(f"read-error-{n}", environment=_fails("read", errno.EIO, n, "IN"))
            for n in (0, 5000, 100_000)
        ),
        *(Fault(f"handles-{n}", inside=_handles(n)) for n in (0, 2, 5, 10)),
        *(
            Fault(f"memory-{n}", inside=_memory(resource.RLIMIT_AS, "VmSize", n))
            for n in (0, 8, 20, 60, 150)
        ),
        *(
            Fault(f"data-{n}", inside=_memory(resource.RLIMIT_DATA, "VmData", n))
            for n in (0, 8, 30, 100)
        ),
        Fault("read-only", volume=64 * MIB, read_only=True),
        Fault("stdout-closed", stdout="closed"),
        Fault("stdout-full", stdout="/dev/full"),
    )
}


@dataclass
class End:
    """How a command ended; `wrong` is empty where all is as it must be."""

    code: int
    seconds: float
    message: str
    wrong: list[str]


@contextmanager
def volume(folder: Path, size: int) -> Iterator[Path]:
    """Mount a small file system at a folder."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def used(folder: Path) -> int:
    facts = os.statvfs(folder)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def attempt(
    argv: Sequence[str],
    fault: Fault,
    folder: Path,
    inputs: Path,
    *,
    needs: int = 0,
    kept: Sequence[str] = (),
    prepare: Callable[[Path], None] | None = None,
) -> End:
    """Run a command line, in which {out} is its output, under a fault.

    Args:
        needs: bytes that the command writes where nothing fails.
        kept: patterns of what may stay, because the same command goes on from it.
        prepare: put into the folder of the output what is there before.
    """
    place = folder / "place"
    with ExitStack() as stack:
        if fault.volume is None:
            place.mkdir(parents=True)
        else:
            whole = fault.volume > 1
            size = int(fault.volume if whole else max(4096, needs * fault.volume))
            stack.enter_context(volume(place, size if whole else 64 * MIB))
        if prepare is not None:
            prepare(place)
        if fault.volume is not None and not whole:
            subprocess.run(["mount", "-o", f"remount,size={used(place) + size}", place], check=True)
        if fault.read_only:
            subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        before = _names(place)
        environment = {
            key: {"OUT": str(place), "IN": str(inputs)}.get(value, value)
            for key, value in fault.environment.items()
        }
        line = [str(word).replace("{out}", str(place / "out")) for word in argv]
        start = time.monotonic()
        code, out, said = forked(line, fault, environment)
        seconds = time.monotonic() - start
        left = sorted(_names(place) - before)
    message = said.rpartition("megasink: error: ")[2].strip()
    wrong = []
    if "Traceback" in said or "Traceback" in out:
        wrong.append(f"a traceback: {said[-400:]}")
    elif code == 128 + signal.SIGPIPE and fault.stdout == "closed":
        if re.search(r"megasink: |Error|Exception|[Ww]arning", said):
            wrong.append(f"said of a closed output: {said[-600:]}")
    elif code not in (0, 2):
        wrong.append(f"exit code {code}: {said[-600:]}")
    elif code == 2:
        lines = message.splitlines()
        if said.count("megasink: error: ") != 1:
            wrong.append(f"not one line of ours: {said[-600:]}")
        elif len(lines) > 1 and not all(re.match(r"  \d+\. ", each) for each in lines[1:]):
            wrong.append(f"more than a line: {said[-900:]}")
        elif len(said.strip().splitlines()) > len(lines):
            extra = [e for e in said.splitlines() if re.search(r"Error|Exception|[Ww]arning", e)]
            # Log lines of Megatron in a rank; hooks of Python, which have no memory either.
            known = re.compile(
                r"megasink: |ERROR:megatron|WARNING:megatron|audit hook|^MemoryError"
            )
            extra = [e for e in extra if e not in message and not known.search(e)]
            wrong += [f"besides: {extra[:3]}"] if extra else []
    strange = [p for p in left if ".partial" in p or p.endswith(".lock")]
    if code != 0 and not fault.stdout:  # of what is whole only the name was not said
        strange = left
    if fault.name.startswith("handles"):  # a folder that cannot be opened cannot be emptied
        strange = [p for p in strange if "/partial/" not in p]
    strange = [p for p in strange if not any(Path(p).match(pattern) for pattern in kept)]
    if strange:
        wrong.append(f"left {strange[:6]}")
    return End(code, seconds, message if code else "", wrong)


def _names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()} | {
        str(p.relative_to(folder)) for p in folder.rglob(".*")
    }


def forked(line: Sequence[str], fault: Fault, environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command; -9 for a hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    pipes = {number: os.pipe() for number in (1, 2)}
    child = os.fork()
    if child == 0:
        _become(line, fault, environment, pipes)
    texts = {1: b"", 2: b""}

    def read(number: int) -> None:
        with os.fdopen(pipes[number][0], "rb") as file:
            texts[number] = file.read()

    threads = []
    for number, (receiving, sending) in pipes.items():
        os.close(sending)
        if number == 1 and fault.stdout:
            os.close(receiving)
        else:
            threads.append(threading.Thread(target=read, args=(number,)))
            threads[-1].start()
    timer = threading.Timer(SECONDS, lambda: os.killpg(child, signal.SIGKILL))
    timer.start()
    try:
        _, status = os.waitpid(child, 0)
    finally:
        timer.cancel()
    for thread in threads:
        thread.join()
    out, said = (texts[n].decode(errors="backslashreplace") for n in (1, 2))
    return os.waitstatus_to_exitcode(status), out, said


def _become(
    line: Sequence[str],
    fault: Fault,
    environment: dict[str, str],
    pipes: dict[int, tuple[int, int]],
) -> None:
    """The command, in the process that was forked for it; never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        for number, (receiving, sending) in pipes.items():
            os.close(receiving)
            os.dup2(sending, number)
            os.close(sending)
        if fault.stdout == "closed":
            # The parent closes the other end at once; wait until it has.
            import select

            poll = select.poll()
            poll.register(1, 0)
            poll.poll()
        elif fault.stdout:
            os.dup2(os.open(fault.stdout, os.O_WRONLY), 1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["megasink", *line]
        os.environ.update(environment)
        from megasink import cpu
        from megasink.__main__ import run
        from megasink.training.pretrain import main as rank

        if line[0] == "finetune":  # without torchrun and Megatron, whose platform shows it a GPU
            cpu.deactivate()
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                os.environ.pop(name)

        if fault.inside is not None:
            fault.inside()
        code = rank(line[1:]) if line[0] == "rank" else run()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            code = code or 120  # as Python ends
        sys.stderr.flush()
        os._exit(code)
