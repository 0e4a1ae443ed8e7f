"""One temporary folder for the sockets of this process and its workers, removed at its end.

multiprocessing makes a folder in every process that passes file descriptors, such as data loader
workers, and a killed worker leaves it behind. Here workers share the folder of their parent; the
next process that starts removes the folder of a killed one.
"""

import multiprocessing.process
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

from megasink.files.atomic import lock_folder, remove_dead

_PREFIX = "msocks-"  # short: the path of a socket has at most 107 bytes


@contextmanager
def shared_folder() -> Iterator[None]:
    """Let this process, and those it starts in the body, share one multiprocessing folder.

    `multiprocessing.util.get_temp_dir` makes none if the process has one, and child processes
    inherit it.
    """
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is not None:
        yield
        return
    remove_dead(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"))
    folder, lock = _locked_folder()
    config["tempdir"] = str(folder)
    try:
        yield
    finally:
        config["tempdir"] = None
        with suppress(OSError):
            resource_sharer.stop()  # it listens in the folder; the next run starts it again
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked_folder() -> tuple[Path, int | None]:
    """Make a folder and lock it; another process may remove it before it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if not lock_folder(lock):  # a file system without locks, or removed at this moment
            os.close(lock)
            if folder.exists():
                return folder, None
        elif folder.exists():
            return folder, lock
        else:
            os.close(lock)
