"""Agree on the number of an attempt, under which its ranks meet in torchrun's store.

The store outlives the ranks: torchrun starts new ones when one fails (``--max-restarts``) and when
a lost host comes back. Its own count of restarts does not distinguish attempts: each agent counts
for itself, a returning host starts at 0, and a changed membership is not counted. Ranks that use an
earlier attempt's keys would read the addresses of dead ranks, and wait for them.
"""

import os
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

from megasink.errors import UserError
from megasink.training.network import own_address
from megasink.training.stop import RankState
from megasink.training.waiting import here, is_first_here, same_name_elsewhere, waiting


def open_store(timeout: float) -> Any:
    """Return the store that this attempt's ranks share; refuse if a rank does not come in time."""
    import torch

    at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    master = f"rank 0, whose store is at {at} (are all TCP ports open between the hosts?)"
    others = f"the other ranks of {os.environ.get('WORLD_SIZE')} to start"
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

    Rank 0 opens an attempt, and begins it when all others have joined. A rank may find an earlier
    attempt first. If that one began, every rank's name has joined it, and a rank does not join
    twice. If not, it never will: its rank 0 is gone, because torchrun ends all ranks before it
    starts new ones.
    """
    end = time.monotonic() + timeout
    pause = max(0.05, world / 2000)  # the store serves every rank
    run = f"megasink/{world}"  # a job of another size has other ranks
    if rank == 0:
        prefix = f"{run}/{store.add(f'{run}/opened', 1)}"
        store.add(_hosts_called(prefix), 1)
        while store.add(f"{prefix}/joined", 0) < world - 1:
            if time.monotonic() > end:
                raise UserError(f"{_late(store, world)} did not start within {timeout:.0f} s")
            time.sleep(pause)
        store.set(f"{prefix}/begun", "1")
        return prefix
    seen, joined, myself = 0, "", uuid.uuid4().hex
    while True:
        if (number := store.add(f"{run}/opened", 0)) > seen:
            seen, prefix = number, f"{run}/{number}"
            if store.compare_set(f"{prefix}/rank {rank}", "", myself) == myself.encode():
                store.add(_hosts_called(prefix), int(is_first_here()))
                store.add(f"{prefix}/joined", 1)
                joined = prefix
        if joined and store.check([f"{joined}/begun"]):
            return joined
        if time.monotonic() > end:
            raise UserError(f"rank {rank} waited {timeout:.0f} s for all {world} ranks to start")
        time.sleep(pause)


def _hosts_called(prefix: str) -> str:
    """Return the key with the number of hosts of an attempt that have this host's name."""
    return f"{prefix}/hosts called {socket.gethostname()}"


def _late(store: Any, world: int) -> str:
    """Name the ranks that have not joined the attempt that rank 0 opened last."""
    prefix = f"megasink/{world}/{store.add(f'megasink/{world}/opened', 0)}"
    late = [r for r in range(1, world) if not store.check([f"{prefix}/rank {r}"])]
    names = ", ".join(map(str, late[:8])) + (" ..." if len(late) > 8 else "")
    return f"rank{'s' * (len(late) > 1)} {names} of {world}"
