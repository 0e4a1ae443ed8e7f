"""Several hosts compare themselves before the first step, through the store that the start opens.

Rank 0 tells what its host trains with. The first rank of every other host compares, and looks for
the files that rank 0 has put into the folders that all share. A rank that cannot start says so in
the same place. So every host names what is wrong, and none waits for one that has ended.
"""

import contextlib
import json
import os
import secrets
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megasink.data.object_store import is_stored
from megasink.errors import UserError
from megasink.training.attempt import open_store
from megasink.training.stop import RankState
from megasink.training.waiting import HERE, is_first_here, on_several_hosts, waiting

RANKS = "MEGASINK_RANKS"
"""Variable with the number of ranks that the command which starts them counts on."""
START, HEARD = "start", "heard"
"""Keys of rank 0's decision, and of the number of ranks that have read it."""
_OFFER, _ANSWERS, _PROBLEMS = "hosts/offer", "hosts/answers", "hosts/problems"
_HEARD_SECONDS = 10.0
_SHARED_SECONDS = 20.0  # until a file system shows what another host has written
_MEET_SECONDS = 60.0  # for a rank that cannot start to meet the others
_MOST = 4  # hosts, or differences of one, in a message


def refuse_another_world() -> None:
    """Refuse a job of another size than the command that started it counts on.

    Raises:
        UserError: torchrun let more or fewer ranks meet; with the likely reasons.
    """
    expected, world = os.environ.get(RANKS), os.environ.get("WORLD_SIZE", "1")
    if expected is not None and expected != world:
        raise UserError(
            f"{HERE}: {world} rank{' has' if world == '1' else 's have'} met, but NNODES x "
            f"RANKS_PER_NODE make {expected}: give every host the same NNODES and RANKS_PER_NODE, "
            "and set the hosts' clocks by NTP (torchrun drops a host whose clock is 15 s off)"
        )


def compare(store: Any, args: Namespace) -> None:
    """Tell the other hosts what this one trains with, and wait for their answers. Rank 0 calls it.

    Raises:
        UserError: hosts differ, or a rank cannot start; names host and difference.
    """
    from megasink.training.host_facts import facts_of

    with _marked(args) as marks:
        offer = {"host": HERE, "facts": facts_of(args), "marks": marks}
        store.set(_OFFER, json.dumps(offer))
        end = time.monotonic() + 60 * args.distributed_timeout_minutes
        with waiting(lambda: f"{_missing(store, args)} ranks to compare their hosts with this one"):
            while _missing(store, args):
                if time.monotonic() > end:
                    raise UserError(f"{_missing(store, args)} ranks did not compare their hosts")
                time.sleep(0.05)
    if store.check([_PROBLEMS]):
        raise UserError(_shortened(store.get(_PROBLEMS).decode().splitlines()))


def answer(store: Any, args: Namespace) -> None:
    """Compare this host with that of rank 0. Every other rank calls it; the first of a host does.

    Returns at once if rank 0 has refused the start.
    """
    from megasink.training.host_facts import differences, facts_of

    if is_first_here():
        with waiting(lambda: f"rank 0 on {os.environ['MASTER_ADDR']} to compare"):
            while not store.check([_OFFER]):
                if store.check([START]):
                    return
                time.sleep(0.05)
        offer = json.loads(store.get(_OFFER))
        try:
            problems = differences(facts_of(args), offer["facts"], offer["host"])
            problems += _not_shared(args, offer["marks"], offer["host"])
        except Exception as error:  # rank 0 waits for the answer
            problems = [f"{type(error).__name__}: {error}"]
        if problems:
            _add_problem(store, f"{_shortened(problems)}: start every host with the same command")
    store.add(_ANSWERS, 1)


def refuse(store: Any, world: int, error: object) -> None:
    """Tell the other ranks that rank 0 does not start, and wait: the store may end with it."""
    store.set(START, json.dumps({"refused": str(error)}))
    end = time.monotonic() + _HEARD_SECONDS
    while store.add(HEARD, 0) < world - 1 and time.monotonic() < end:
        time.sleep(0.05)


def tell(error: BaseException) -> bool:
    """Tell the other hosts that this rank cannot start, if they have not met yet.

    Returns:
        whether rank 0 has told every rank; then each host has said why.
    """
    if not on_several_hosts() or RankState.attempt:
        return False
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with contextlib.suppress(UserError, RuntimeError):  # the others are not there
        store = open_store(_MEET_SECONDS)
        if rank == 0:
            refuse(store, world, f"{HERE}: {text}")
            return True
        _add_problem(store, text)
        store.add(_ANSWERS, 1)
        end = time.monotonic() + _MEET_SECONDS
        while time.monotonic() < end:
            if store.check([START]):
                store.add(HEARD, 1)
                time.sleep(2.0)  # torchrun ends this host's other ranks when this one ends
                return True
            time.sleep(0.05)
    return False


def _add_problem(store: Any, text: str) -> None:
    store.append(_PROBLEMS, f"{HERE}: {' '.join(text.split())}\n")


def _missing(store: Any, args: Namespace) -> int:
    return int(args.world_size - 1 - store.add(_ANSWERS, 0))


def _shortened(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _MOST} more" if len(texts) > _MOST else ""
    return "; ".join(texts[:_MOST]) + more


def _shared(args: Namespace) -> dict[str, Path]:
    """Return the folders that all hosts write to or read from, by flag."""
    folders = {"--run-dir": args.run_dir, "--save": args.save}
    if not args.mock_data:
        folders["--data-cache-path"] = args.data_cache_path
    given = {flag: Path(path) for flag, path in folders.items() if path and not is_stored(path)}
    run = given.get("--run-dir")
    inside = [flag for flag, path in given.items() if run and run in path.parents]
    return {flag: path for flag, path in given.items() if flag not in inside}


@contextlib.contextmanager
def _marked(args: Namespace) -> Iterator[dict[str, str]]:
    """Put a file of a name that no other host can guess into each shared folder, for the body."""
    made: dict[str, Path] = {}
    new = [folder for folder in _shared(args).values() if not folder.exists()]
    try:
        for flag, folder in _shared(args).items():
            mark = folder / f"lease.{secrets.token_hex(8)}"  # allowed in a folder without a run
            try:
                folder.mkdir(parents=True, exist_ok=True)
                mark.touch()
            except OSError as error:
                raise UserError(_not_written(flag, folder, error)) from error
            made[flag] = mark
        yield {flag: mark.name for flag, mark in made.items()}
    finally:
        for mark in made.values():
            with contextlib.suppress(OSError):
                mark.unlink()
        for folder in new:
            with contextlib.suppress(OSError):  # in use
                folder.rmdir()


def _not_shared(args: Namespace, marks: dict[str, str], host: str) -> list[str]:
    """Describe each folder in which this host finds no file of rank 0's, or cannot write."""
    problems, end = [], time.monotonic() + _SHARED_SECONDS
    for flag, folder in _shared(args).items():
        own = folder / f"lease.{secrets.token_hex(8)}"
        try:
            while not (folder / marks.get(flag, own.name)).exists():
                # What this host writes makes a network file system look at the folder again.
                with contextlib.suppress(FileNotFoundError):
                    own.touch()
                    own.unlink()
                if time.monotonic() > end:
                    problems.append(
                        f"{flag} {folder} is another folder than on {host}: it must be on a file "
                        "system that all hosts share"
                    )
                    break
                time.sleep(0.2)
            else:
                own.touch()
                own.unlink()
        except OSError as error:
            problems.append(_not_written(flag, folder, error))
    return problems


def _not_written(flag: str, folder: Path, error: OSError) -> str:
    return f"{flag} {folder} cannot be written: {error.strerror}"
