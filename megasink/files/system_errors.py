"""One line for a failure of the machine: a full disk, a quota, no memory, no open file left.

Packages report its number in an `OSError`, or in the text of an error or its cause.
"""

import errno
import linecache
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megasink.errors import UserError

OUTPUT = "the output"
_SPACE = "free some space or choose another folder"
# Error of the machine -> advice. Only these are looked for in texts and causes.
CURES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: "raise the file size limit (ulimit -f) or choose another folder",
    errno.EROFS: "choose a writable folder",
    errno.EIO: "check the disk (dmesg)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close programs that keep many files open",
    errno.ENOMEM: "close other programs, process less at once or raise the limit (ulimit -v)",
}
_WRITES_ONLY = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_WRITING = re.compile(r"write|print|sync|flush|trunc|save|dump|replace|rename|mkdir|touch|unlink")
# How Rust, Python and C++ write the number.
_NUMBER = re.compile(r"(?:os error|code:|Errno|error code:?) (\d+)")
_NO_MEMORY = re.compile(r"annot allocate|an't allocate|nable to allocate|bad_alloc|can't start new")
_NO_MAP = "failed to map segment"  # of a library that is imported
_AVAILABLE = re.compile(r"MemAvailable:\s+(\d+) kB")


def explained(error: BaseException, what: object = None, cure: str = "") -> str | None:
    """Return the line for an error that the machine caused (full disk, memory), otherwise None."""
    found = next((each for each in _with_causes(error) if _number(each)), None)
    if found is None:
        return None
    number, name = _number(found), getattr(found, "filename", None)
    if number == errno.ENOMEM:
        return f"out of memory{_memory_left()}: {CURES[number]}"
    what = what or name or "a file"
    reason = os.strerror(number)
    if number in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{what} cannot be opened: {reason} (limit: {limit}): {CURES[number]}"
    if not writes(found):
        return f"{name or what} cannot be read: {reason}: {CURES[number]}"
    advice = cure if cure and CURES[number] == _SPACE else CURES[number]
    return f"{what} cannot be written: {reason}{_room(name or what)}: {advice}"


@contextmanager
def writing(what: object, cure: str = "") -> Iterator[None]:
    """Turn a system error on the way to a file, such as "--output FOLDER", into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        line = explained(error, what, cure)
        if line is None and isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            line = f"{what} cannot be written: {error.strerror or error}"
        if line is None:
            raise
        raise UserError(line) from error


def writes(error: BaseException) -> bool:
    """Return whether the failed operation writes, by the error's number or its line."""
    return _number(error) in _WRITES_ONLY or bool(_WRITING.search(_source(error)))


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _number(error: BaseException) -> int:
    """Return the number of an error of the machine; 0 for any other error."""
    if isinstance(error, OSError) and error.errno:
        return error.errno if error.errno in CURES else 0
    text = str(error)
    if isinstance(error, MemoryError) or _NO_MEMORY.search(text) or _NO_MAP in text:
        return errno.ENOMEM
    given, text = {int(number) for number in _NUMBER.findall(text)}, text.lower()
    return next((n for n in CURES if n in given or os.strerror(n).lower() in text), 0)


def _source(error: BaseException) -> str:
    """Return the innermost Python function and line of an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    code = trace.tb_frame.f_code
    return f"{code.co_name} {linecache.getline(code.co_filename, trace.tb_lineno)}"


def _room(what: object) -> str:
    """Return the free space where a file is, in words."""
    if what == OUTPUT:
        return ""
    with suppress(OSError, ValueError):
        folder = Path(str(what).rpartition(" ")[2]).absolute()
        while not folder.is_dir():
            folder = folder.parent
        facts = os.statvfs(folder)
        files = "" if facts.f_favail or not facts.f_files else " and no files"
        return f" ({shutil.disk_usage(folder).free / 1e6:,.1f} MB{files} free there)"
    return ""


def _memory_left() -> str:
    """Return the machine's free memory, and a limit of this process, in words."""
    given = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    limits = [limit for limit in given if limit != resource.RLIM_INFINITY]
    words = [f"this process may use {min(limits) / 1e9:.1f} GB"] if limits else []
    with suppress(OSError):
        text = Path("/proc/meminfo").read_text()
        words += [f"{int(kb) / 1e6:.1f} GB are free" for kb in _AVAILABLE.findall(text)]
    return f" ({', '.join(words)})" if words else ""


def is_hub_name(path: Path) -> bool:
    """Return whether a missing path may be a name of the Hugging Face hub."""
    return len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists()


def missing_folder(folder: Path, flag: str = "") -> str:
    """Return the error for a missing folder; for a name of the hub, with a download command."""
    if folder.is_file():
        return f"{folder}: this is a file: give a folder"
    problem = f"{folder}: no such folder; nothing is downloaded"
    if is_hub_name(folder):
        flag = flag and f"add {flag}, or "
        download = f"{flag}run hf download {folder} --local-dir {folder.name}"
        problem += f". If it is a name on the Hugging Face hub, {download} and pass {folder.name}"
    return problem
