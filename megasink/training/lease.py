"""The lease of a run folder, held until `release` or process exit; refused to a second trainer."""

import atexit
import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megasink.console.printable import printable, say
from megasink.errors import UserError
from megasink.files.json_file import objects_in, open_file
from megasink.files.system_errors import writing
from megasink.training.stop import write_to_stderr
from megasink.training.waiting import machine

LEASE = "lease"
OWNER = "owner.json"
BEAT_SECONDS = 15.0
EXPIRY_SECONDS = 120.0
_SAY_SECONDS = 30.0


class _Seen(NamedTuple):
    """A lease on disk: its owner, inode, and last beat."""

    owner: dict[str, Any]
    file: int
    beat: int  # nanoseconds of the file server's clock
    problem: str = ""


class Lease:
    """The lease of a run folder, held until `release` or process exit; refuses a live trainer."""

    def __init__(self, folder: Path, say: Callable[[str], None] = say):
        self._path = folder / LEASE / OWNER
        self._owner = machine() | {
            "pid": os.getpid(),
            "started": _start(os.getpid()),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "token": secrets.token_hex(8),
        }
        self._released = threading.Event()
        with writing(f"--run-dir {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            while not self._create():
                if (dead := wait_until_expired(folder, say)) is not None:
                    _remove(self._path, dead)
        self._beats = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._beats.start()
        atexit.register(self.release)

    def release(self) -> None:
        """Release the folder. Does nothing the second time, or in a child of the owner."""
        if self._released.is_set() or os.getpid() != self._owner["pid"]:
            return
        self._released.set()
        atexit.unregister(self.release)
        self._beats.join()
        with contextlib.suppress(OSError):
            if self._is_mine():
                _unlink(self._path)

    def _create(self) -> bool:
        """Try to create the lease, complete."""
        made = self._path.parent.with_name(f"lease.{self._owner['token']}")
        try:
            made.mkdir()
            (made / OWNER).write_text(json.dumps(self._owner))
            made.rename(self._path.parent)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return False
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return True

    def _is_mine(self) -> bool:
        seen = _read(self._path)
        return seen is not None and seen.owner.get("token") == self._owner["token"]

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # file server unavailable: retry at the next beat
                if not self._is_mine() and not self._create():
                    self._end()
                os.utime(self._path)

    def _end(self) -> None:
        """Exit without saving: another trainer now writes to the folder."""
        seen = _read(self._path)
        write_to_stderr(
            f"megasink: error: {self._path.parent.parent} was taken over by "
            f"{_name(seen.owner if seen else {})} while this trainer was stalled: this trainer ends"
        )
        os._exit(2)


def wait_until_expired(folder: Path, say: Callable[[str], None] = say) -> _Seen | None:
    """Wait until a dead owner's lease expires, and return it; refuse a live owner."""
    try:
        return _expired(folder, say)
    except OSError as error:
        raise UserError(f"--run-dir {folder} cannot be used: {error.strerror}") from error


def _expired(folder: Path, say: Callable[[str], None]) -> _Seen | None:
    path = folder / LEASE / OWNER
    first = _read(path)
    if first is not None and first.problem:
        raise UserError(f"{first.problem}: remove {path.parent} if no trainer writes to {folder}")
    if first is None or _is_dead(first.owner):
        return first
    if _on_this_machine(first.owner):
        raise UserError(_taken(folder, first.owner))
    end = time.monotonic() + EXPIRY_SECONDS - _age(path, first)
    reported = -_SAY_SECONDS
    while (left := end - time.monotonic()) > 0:
        if time.monotonic() - reported >= _SAY_SECONDS:
            reported = time.monotonic()
            say(
                f"megasink: {folder} is leased to {_name(first.owner)} on another machine: "
                f"this trainer starts in {left:.0f} s if that trainer stays silent"
            )
        time.sleep(min(left, 0.5))
        seen = _read(path)
        if seen is None:
            return None
        if seen != first:
            raise UserError(_taken(folder, seen.owner))
    return first


def writer_of(folder: Path) -> str | None:
    """Describe the process that writes to a run folder, without waiting; None without one."""
    path = folder / LEASE / OWNER
    with contextlib.suppress(OSError):
        seen = _read(path)
        # The clocks of two machines may differ by more, which only changes what is reported.
        age = 0.0 if seen is None else time.time() - seen.beat / 1e9
        is_expired = age > EXPIRY_SECONDS and not (seen and _on_this_machine(seen.owner))
        if seen and not is_expired and not _is_dead(seen.owner):
            return _name(seen.owner)
    return None


def clear(folder: Path) -> None:
    """Remove the lease of an owner that died on this machine without releasing it."""
    path = folder / LEASE / OWNER
    with contextlib.suppress(OSError):
        seen = _read(path)
        if seen is not None and _is_dead(seen.owner):
            _remove(path, seen)


def is_part_of_a_lease(name: str) -> bool:
    """Return whether a name in a run folder belongs to a lease or its temporary files."""
    return name == LEASE or name.startswith(f"{LEASE}.")


def _read(path: Path) -> _Seen | None:
    try:
        # Opening a file queries the file server; attributes alone may come from a cache.
        with open_file(path) as file:
            status, text = os.fstat(file.fileno()), file.read(1 << 16)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UserError as error:
        return _Seen({}, 0, 0, str(error))
    owner = next(objects_in([text]), {})
    pid = owner.get("pid", 1)
    if type(pid) is not int or not 0 < pid < 1 << 31:
        problem = f"{path} is damaged: its pid is {pid!r:.40}"
        return _Seen({}, status.st_ino, status.st_mtime_ns, problem)
    return _Seen(owner, status.st_ino, status.st_mtime_ns)


def _remove(path: Path, dead: _Seen) -> None:
    """Remove an expired lease, unless another trainer has taken it over."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        with contextlib.suppress(OSError):  # no file locks: owners find out at their next beat
            fcntl.flock(file, fcntl.LOCK_EX)
        if _read(path) == dead:
            _unlink(path)


def _unlink(path: Path) -> None:
    """Remove a lease; its folder stays if another trainer has replaced the lease."""
    path.unlink()
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def _age(path: Path, seen: _Seen) -> float:
    """Return the seconds since the last beat, by the file server's clock."""
    probe = path.parent.with_name(f"lease.{secrets.token_hex(8)}")
    try:
        probe.touch()
        return max(0.0, (probe.stat().st_mtime_ns - seen.beat) / 1e9)
    finally:
        probe.unlink(missing_ok=True)


def _on_this_machine(owner: dict[str, Any]) -> bool:
    here = machine()
    return bool(here["boot"]) and all(owner.get(name) == here[name] for name in here)


def _is_dead(owner: dict[str, Any]) -> bool:
    """Return whether the owner was a process of this machine and has ended."""
    if not _on_this_machine(owner):
        return False
    pid = owner.get("pid", 0)
    started = _start(pid)
    if started is None and _is_hidden(pid):
        return False
    return started != owner.get("started")


def _start(pid: int) -> int | None:
    """Return a process's start time in ticks since boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # a zombie holds nothing


def _is_hidden(pid: int) -> bool:
    """Return whether a process exists but is hidden from /proc: another user's, under hidepid."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not Path(f"/proc/{pid}").exists()
    except OSError:
        pass
    return False


def _name(owner: dict[str, Any]) -> str:
    if not owner:
        return "an unknown trainer"
    text = f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"
    return printable(text, keep="")[:200]  # the file is untrusted


def _taken(folder: Path, owner: dict[str, Any]) -> str:
    return (
        f"--run-dir {folder} is in use by another trainer ({_name(owner)}): wait until it "
        "ends, or choose another folder"
    )
