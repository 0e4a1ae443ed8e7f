"""Compare the hosts of a job before the first step, through the store that the start opens.

Rank 0 publishes its host's fingerprint. The first rank of every other host compares it with its
own, and looks for the files that rank 0 has put into the shared folders. Every host then reports
each difference. An error before the hosts meet travels with torchrun (multi_host_torchrun.py).
"""

import contextlib
import json
import os
import secrets
import socket
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasink.checkpoints.damage import checkpoint_path, iterations
from megasink.data.dataset_files import is_stored
from megasink.errors import UserError, listed
from megasink.training.exit_reasons import named
from megasink.training.host_fingerprint import differences, facts_of
from megasink.training.waiting import clocks_apart, here, is_first_here, until, waiting
from megasink.training.watchdog import guard

START, HEARD = "start", "heard"
"""Keys of rank 0's decision, and of the number of ranks that have read it."""
_OFFER, _HOST = "hosts/offer", "hosts/host"
_ANSWERS, _PROBLEMS = "hosts/answers", "hosts/problems"
_CLOCK = "hosts/clock"  # of rank 0
_HEARD_SECONDS = 10.0
_SHARED_SECONDS = 20.0  # until a file system shows what another host has written
_LARGE_SECONDS = 30.0  # for the first message that is larger than a packet
_MOST, _MOST_FILES = 4, 64  # hosts, or differences of one, in a message; files to look for


def compare(store: Any, args: Namespace) -> None:
    """Publish this host's fingerprint, and refuse hosts that differ. For rank 0."""
    with _marked(args) as marks:
        offer = {"facts": facts_of(args), "marks": marks}
        store.set(_HOST, here())
        store.set(_OFFER, json.dumps(offer))

        def answered() -> bool:
            store.set(_CLOCK, str(time.time()))
            return not _missing(store, args)

        with waiting(lambda: f"{_missing(store, args)} ranks to compare their hosts with this one"):
            if not until(answered, 60 * args.distributed_timeout_minutes):
                raise UserError(f"{_missing(store, args)} ranks did not compare their hosts")
    if store.check([_PROBLEMS]):
        raise UserError(listed(store.get(_PROBLEMS).decode().splitlines(), _MOST))


def answer(store: Any, args: Namespace) -> None:
    """Compare this host with rank 0's. Every other rank calls it; the first of a host acts."""
    if is_first_here():
        with waiting(lambda: f"rank 0 on {os.environ['MASTER_ADDR']} to compare the hosts"):
            until(lambda: store.check([_OFFER]) or store.check([START]))
        if not store.check([_OFFER]):
            return
        host = store.get(_HOST).decode()
        offer = _long_messages(store, host)
        try:
            problems = differences(facts_of(args), offer["facts"], host)
            problems += _not_shared(args, offer["marks"], host) + _clock(store, host)
        except Exception as error:  # rank 0 waits for the answer
            problems = [named(error)]
        if problems:
            text = " ".join(f"{here()}: {listed(problems, _MOST)}".split())
            advice = "give all hosts the same command, files and packages"
            store.append(_PROBLEMS, f"{text}: {advice}\n")
    store.add(_ANSWERS, 1)


def _clock(store: Any, host: str) -> list[str]:
    """Describe the offset of rank 0's clock, which is written while rank 0 waits."""
    before, first = time.time(), store.get(_CLOCK)
    until(lambda: store.get(_CLOCK) != first or store.check([START]))
    clock = store.get(_CLOCK)
    ahead = float(clock) - time.time()
    problem = clocks_apart(host, here(), ahead, float(clock) - before)
    return [problem] if problem else []


def _long_messages(store: Any, host: str) -> Any:
    """Return rank 0's offer, and send as much: long messages may fail where short ones pass."""
    what = (
        f"a long message between {host} and {here()} (short ones arrive: give all hosts and "
        "switches the same MTU)"
    )
    try:
        with guard.bounded(what, _LARGE_SECONDS):
            offer = json.loads(store.get(_OFFER))
            store.set("hosts/long", " " * 10_000)  # than jumbo frames; the next call has an answer
            store.add(_ANSWERS, 0)
    except RuntimeError as error:
        # Raises OSError if rank 0 is gone.
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        socket.create_connection(place, _HEARD_SECONDS).close()
        raise UserError(f"{what} was lost: {named(error)}") from error
    return offer


def refuse(store: Any, world: int, error: object) -> None:
    """Report that rank 0 does not start, and wait: the store may end with it."""
    store.set(START, json.dumps({"refused": str(error)}))
    until(lambda: store.add(HEARD, 0) >= world - 1, _HEARD_SECONDS)


def _missing(store: Any, args: Namespace) -> int:
    return int(args.world_size - 1 - store.add(_ANSWERS, 0))


def _shared(args: Namespace) -> dict[str, Path]:
    """Return the folders that all hosts use, by flag or name in --run-dir."""
    folders = {"--run-dir": args.run_dir, "--save": args.save}
    if not args.mock_data:
        folders["--data-cache-path"] = args.data_cache_path
    shared = {flag: Path(path) for flag, path in folders.items() if path and not is_stored(path)}
    # A link or a separate volume may lead elsewhere on one host.
    inside = shared["--run-dir"].glob("*") if "--run-dir" in shared else ()
    apart = [
        p for p in sorted(inside) if p not in shared.values() and (p.is_dir() or p.is_symlink())
    ]
    return shared | {path.name: path for path in apart}


def _real(path: Path) -> Path:
    real = path.resolve()
    return real.parent if path.is_symlink() and real.is_file() else real


@contextlib.contextmanager
def _marked(args: Namespace) -> Iterator[dict[str, Any]]:
    """Put an unguessable file into each shared folder; yield {folder's name: path, files}."""
    made, marks, new = list[Path](), dict[str, Any](), list[Path]()
    try:
        for name, folder in _shared(args).items():
            # A name that is allowed in a folder without a run.
            mark = _real(folder) / f"lease.{secrets.token_hex(8)}"
            if not folder.exists():
                new.append(folder)
            try:
                if not mark.parent.is_dir():
                    folder.mkdir(parents=True)
                mark.touch()
            except OSError as error:
                raise UserError(_not_written(name, folder, error)) from error
            made.append(mark)
            saved = _newest_files(folder) if name == "--save" else []
            marks[name] = {"real": str(mark.parent), "files": [mark.name, *saved]}
        yield marks
    finally:
        for mark in made:
            with contextlib.suppress(OSError):
                mark.unlink()
        for folder in reversed(new):
            with contextlib.suppress(OSError):  # in use
                folder.rmdir()


def _newest_files(folder: Path) -> list[str]:
    """Return some files of the newest checkpoint; its folder may be a link on one host."""
    newest = [checkpoint_path(folder, iteration) for iteration in iterations(folder)[-1:]]
    files = [path for saved in newest for path in sorted(saved.glob("*"))]
    return [str(path.relative_to(folder)) for path in files[:_MOST_FILES]]


def _not_shared(args: Namespace, marks: dict[str, Any], host: str) -> list[str]:
    """Describe each folder in which this host does not find rank 0's files or cannot write."""
    problems, end = [], time.monotonic() + _SHARED_SECONDS
    own = f"lease.{secrets.token_hex(8)}"
    flags = _shared(args)
    for name, there in marks.items():
        folder = flags.get(name) or Path(args.run_dir, name)
        real = _real(folder)
        try:
            while missing := [file for file in there["files"] if not (real / file).exists()]:
                # Writing makes a network file system refresh its view of the folder.
                with contextlib.suppress(FileNotFoundError):
                    (real / own).touch()
                    (real / own).unlink()
                if time.monotonic() > end:
                    problems.append(_differs(name, folder, there, missing, host))
                    break
                time.sleep(0.2)
            else:
                (real / own).touch()
                (real / own).unlink()
        except OSError as error:
            problems.append(_not_written(name, folder, error))
    return problems


def _differs(name: str, folder: Path, there: dict[str, Any], missing: list[str], host: str) -> str:
    advice = "it must be on a file system that all hosts share"
    real, its = _real(folder), there["real"]
    if missing != there["files"]:
        return f"{_named(name, folder)} has no {missing[0]}, which {host} has in {its}: {advice}"
    state = "missing" if not real.is_dir() else "not empty" if any(real.iterdir()) else "empty"
    what = f"{_named(name, folder)} is {real} ({state}), not the same folder as on {host}"
    return f"{what} ({its}): {advice}"


def _not_written(name: str, folder: Path, error: OSError) -> str:
    if folder.is_symlink() and not folder.exists():
        return f"{_named(name, folder)} is a link to {_real(folder)}, which is missing here"
    return f"{_named(name, folder)} cannot be written: {error.strerror}"


def _named(name: str, folder: Path) -> str:
    return f"{name} {folder}" if name.startswith("--") else str(folder)
