"""Start a run on every rank: rank 0 inspects the run folder, and the others follow its decision.

Others must not inspect it: rank 0 may be moving damaged checkpoints aside, and a shared file system
shows changes late. The ranks agree on an attempt first, under whose number they meet in torchrun's
store, which outlives them. torchrun's own count of restarts does not tell attempts apart, and ranks
that take the keys of an earlier one wait for the dead.
"""

import json
import os
import socket
import uuid
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megasink.errors import UserError
from megasink.training import compare_hosts, run_dir
from megasink.training.lease import Lease
from megasink.training.network import own_address
from megasink.training.stop import RankState
from megasink.training.waiting import (
    here,
    is_first_here,
    on_several_hosts,
    same_name_elsewhere,
    until,
    waiting,
)

# Verifying a large checkpoint, or waiting for another host's lease, may take rank 0 a while.
_WAIT_SECONDS = 3600.0


@contextmanager
def starting(args: Namespace, identity: dict[str, Any]) -> Iterator[Any]:
    """Hold the run folder's lease, and set ``args`` to resume from the same step on every rank."""
    # Yields the store for Megatron's process groups, separate for each attempt; None for a single
    # rank. If rank 0 cannot start, every rank raises the same error.
    store = None
    if args.world_size > 1 and not args.fake_process_group:
        store = open_store(60.0 * args.distributed_timeout_minutes)
    together = store is not None and on_several_hosts()
    with ExitStack() as held:
        if together or args.run_dir is not None:
            if args.rank:
                _follow(store, args, together)
            else:
                _lead(store, args, identity, together, held)
        RankState.begun = True
        yield store


def _lead(
    store: Any, args: Namespace, identity: dict[str, Any], together: bool, held: ExitStack
) -> None:
    """Decide on rank 0 whether and from which step the run begins, and let the others know."""
    try:
        if args.run_dir is not None:
            lease = Lease(Path(args.run_dir))
            RankState.release = lease.release
            held.callback(lease.release)
        if together:
            compare_hosts.compare(store, args)
        resumed_from = None
        if args.run_dir is not None:
            # Another trainer may have used the folder since the arguments were checked.
            if problem := run_dir.folder_problem(Path(args.run_dir), resume=args.resume):
                raise UserError(problem)
            resumed_from = run_dir.write_start(args, identity)
    except UserError as error:
        if store is not None:
            compare_hosts.refuse(store, args.world_size, error)
        raise
    if store is not None:
        store.set(compare_hosts.START, json.dumps({"resumed_from": resumed_from}))


def _follow(store: Any, args: Namespace, together: bool) -> None:
    """Wait for rank 0, on the other ranks. Polls, because a wait in the store blocks signals."""
    try:
        if together:
            compare_hosts.answer(store, args)
        with waiting(lambda: f"rank 0 on {os.environ['MASTER_ADDR']} to start"):
            if not until(lambda: store.check([compare_hosts.START]), _WAIT_SECONDS):
                raise UserError(f"rank {args.rank} waited {_WAIT_SECONDS:.0f} s for rank 0")
        answer = json.loads(store.get(compare_hosts.START))
        store.add(compare_hosts.HEARD, 1)
    except (torch.distributed.DistError, OSError) as error:
        master = os.environ["MASTER_ADDR"]
        raise UserError(f"rank 0 on {master} ended before the run began: see its log") from error
    if "refused" in answer:
        raise UserError(answer["refused"])
    if answer["resumed_from"] is not None:
        run_dir.go_on(args)


def open_store(timeout: float) -> Any:
    """Return the store that this attempt's ranks share; refuse if one does not come in time."""
    at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    master = f"rank 0, which runs the ranks' store at {at} "
    master += "(are all TCP ports open between the hosts?)"
    others = f"all {os.environ.get('WORLD_SIZE')} ranks to start"
    whom = others if os.environ.get("RANK") == "0" else master
    try:
        with waiting(lambda: whom):
            store, rank, world = next(
                torch.distributed.rendezvous("env://", timeout=timedelta(seconds=timeout))
            )
    except torch.distributed.DistError as error:
        raise UserError(
            f"{here()} waited {timeout:.0f} s for {whom} ({str(error).splitlines()[0]})"
        ) from error
    with waiting(lambda: f"{_late(store, world)} to start" if rank == 0 else master):
        RankState.attempt = agree(store, rank, world, timeout)
    if store.add(_hosts_called(RankState.attempt), 0) > 1:
        same_name_elsewhere(own_address(os.environ["MASTER_ADDR"])[0])
    return torch.distributed.PrefixStore(RankState.attempt, store)


def agree(store: Any, rank: int, world: int, timeout: float) -> str:
    """Wait for all ranks of this attempt, and return the prefix of its keys. Call on every rank.

    Rank 0 opens an attempt, and begins it when all others have joined. A begun one has been joined
    in the name of every rank, which joins none twice; of one that was not begun, rank 0 is gone.
    """
    pause = max(0.05, world / 2000)  # the store serves every rank
    run = f"megasink/{world}"  # a job of another size has other ranks
    if rank == 0:
        prefix = f"{run}/{store.add(f'{run}/opened', 1)}"
        store.add(_hosts_called(prefix), 1)
        if not until(lambda: store.add(f"{prefix}/joined", 0) >= world - 1, timeout, pause):
            raise UserError(f"{_late(store, world)} did not start within {timeout:.0f} s")
        store.set(f"{prefix}/begun", "1")
        return prefix
    seen, joined, myself = 0, "", uuid.uuid4().hex

    def begun() -> bool:
        nonlocal seen, joined
        if (number := store.add(f"{run}/opened", 0)) > seen:
            seen, prefix = number, f"{run}/{number}"
            if store.compare_set(f"{prefix}/rank {rank}", "", myself) == myself.encode():
                store.add(_hosts_called(prefix), int(is_first_here()))
                store.add(f"{prefix}/joined", 1)
                joined = prefix
        return bool(joined) and store.check([f"{joined}/begun"])

    if not until(begun, timeout, pause):
        raise UserError(f"rank {rank} waited {timeout:.0f} s for all {world} ranks to start")
    return joined


def _hosts_called(prefix: str) -> str:
    """Return the key with the number of hosts of an attempt that have this host's name."""
    return f"{prefix}/hosts called {socket.gethostname()}"


def _late(store: Any, world: int) -> str:
    """Name the ranks that have not joined the attempt that rank 0 opened last."""
    prefix = f"megasink/{world}/{store.add(f'megasink/{world}/opened', 0)}"
    late = [r for r in range(1, world) if not store.check([f"{prefix}/rank {r}"])]
    names = ", ".join(map(str, late[:8])) + (" ..." if len(late) > 8 else "")
    return f"rank{'s' * (len(late) > 1)} {names} of {world}"
