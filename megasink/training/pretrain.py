"""The entry point of each rank: arguments, model configuration, Megatron's ``pretrain``."""

import atexit
import contextlib
import multiprocessing.process
import os
import shutil
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

from megasink import cpu, plugins
from megasink.console.stdout import escape_output
from megasink.cpu import broken_packages
from megasink.cpu.prepare_process import prepare_process
from megasink.errors import ConfigError, Stopped, UserError
from megasink.files.atomic import lock_folder, remove_dead
from megasink.files.system_errors import explained as explained_by_system
from megasink.training import heartbeat, network, parse_arguments, recipes, stop
from megasink.training.checks import host_memory
from megasink.training.exit_reasons import named, reports, tell, wait_for_first
from megasink.training.flag_file import given_device, named_values
from megasink.training.stop import RankState
from megasink.training.waiting import refuse_another_world
from megasink.training.watchdog import guard

_PREFIX = "msocks-"  # short: the path of a socket has at most 107 bytes


def pretrain(argv: Sequence[str]) -> None:
    """Train by these flags. Call on every rank, with torchrun's environment variables."""
    prepare_process(given_device(argv))
    network.choose_gloo_interface(os.environ)
    heartbeat.record()
    if guard.is_looking:
        heartbeat.start()
    args, identity = parse_arguments.parse(argv)
    if problems := list(host_memory.problems(args)):
        raise ConfigError(problems)
    guard.timeout = 60.0 * args.distributed_timeout_minutes
    if args.rank == 0:
        print(cpu.describe(), flush=True)
        for line in broken_packages.describe():
            print(f"not used: {line}", flush=True)
    # Imports Megatron, for which the process is prepared above.
    from megasink.training import loop

    with shared_folder():
        loop.run(args, identity)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; errors are one line on stderr. Does not return after an error."""
    argv = sys.argv[1:] if argv is None else argv
    threading.excepthook = _of_a_thread
    if os.environ.get("RANK", "0") != "0":
        warnings.simplefilter("ignore")
    code = 0
    escape_output()
    try:
        stop.listen()
        guard.start()
        refuse_another_world()
        plugins.load(argv)
        argv = recipes.expanded(argv)
        run_dir = dict(named_values(argv)).get("run-dir")
        RankState.run_dir = Path(run_dir[-1]) if run_dir else None
        pretrain(argv)
    except Stopped as error:
        code = error.exit_code
        _say(f"megasink: {error}")
    except SystemExit as error:  # from Megatron, for example at --exit-interval
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            _say(error.code)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        line = str(error) if isinstance(error, UserError) else _of_the_machine(error)
        if not line:
            traceback.print_exc()
        code = 2 if line else 1
        left = stop.left(RankState.run_dir)
        _end(UserError(line) if line else error, f"megasink: {f'error: {line}' if line else left}")
    if code or not heartbeat.farewell():
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    atexit.register(guard.bound, "the end of the process", guard.end_seconds)
    return 0


def _of_the_machine(error: BaseException) -> str | None:
    """Return the line for a failure of the machine; None for any other error."""
    if isinstance(error, BrokenPipeError):
        return f"the reader of this rank's output has ended ({error.strerror}): keep it running"
    return explained_by_system(error)


def _of_a_thread(raised: threading.ExceptHookArgs) -> None:
    """Report an error that a package raised in a thread, in one line if the machine caused it."""
    line = raised.exc_value and explained_by_system(raised.exc_value)
    if not line:
        threading.__excepthook__(raised)
    elif reports():
        stop.write_to_stderr(f"megasink: {line}")


def _end(error: BaseException, line: str) -> None:
    """Report once per host why the ranks end, and inform the other hosts."""
    reporting = reports()
    _say(line)
    stop.write_to_torchrun(named(error))
    if not reporting and isinstance(error, UserError):
        wait_for_first()
        _say(line)
    if RankState.begun:
        tell(error)
        heartbeat.linger()


def _say(line: str) -> None:
    if reports():
        stop.write_to_stderr(line)


@contextlib.contextmanager
def shared_folder() -> Iterator[None]:
    """Let this process, and those it starts in the body, share one multiprocessing folder."""
    # A killed worker would leave its own behind. The next process removes the folder of a killed
    # one.
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
        with contextlib.suppress(OSError):
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
        is_locked = lock_folder(lock)
        if folder.exists() and is_locked:
            return folder, lock
        os.close(lock)
        if folder.exists() and not is_locked:  # a file system without locks
            return folder, None
