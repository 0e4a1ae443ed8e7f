"""Start a run on every rank: rank 0 inspects the run folder, and the others follow its decision.

Other ranks must not inspect it themselves: rank 0 may be moving damaged checkpoints aside, and a
shared file system shows one host's changes to others later.
"""

import json
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from megasink.errors import UserError
from megasink.train import run_dir
from megasink.train.attempt import agree
from megasink.train.lease import Lease
from megasink.train.stop import Told

# Verifying a large checkpoint, or waiting for another host's lease, may take rank 0 a while.
_WAIT_SECONDS = 3600.0
_HEARD_SECONDS = 10.0
_START, _HEARD = "start", "heard"


@contextmanager
def starting(args: Namespace, identity: dict[str, Any]) -> Iterator[Any]:
    """Hold the run folder's lease, and set ``args`` to resume from the same step on every rank.

    Yields:
        the store for Megatron's process groups, separate for each attempt (attempt.py): torchrun's
        store survives a restart of the ranks. None for a single rank.

    Raises:
        UserError: on every rank, if rank 0 cannot start: another trainer uses the folder, it cannot
            be written, or it has no intact checkpoint.
    """
    store = _store(args)
    if args.run_dir is None:
        yield store
        return
    if args.rank:
        _follow(store, args)
        yield store
        return
    try:
        lease = Lease(Path(args.run_dir))
    except UserError as error:
        _refuse(store, args, error)
        raise
    Told.release = lease.release
    try:
        _begin(store, args, identity)
        yield store
    finally:
        lease.release()


def _begin(store: Any, args: Namespace, identity: dict[str, Any]) -> None:
    """Record the start on rank 0, which holds the lease, and tell the other ranks."""
    try:
        # Another trainer may have used the folder since the arguments were checked.
        if problem := run_dir.folder_problem(Path(args.run_dir), resume=args.resume):
            raise UserError(problem)
        resumed_from = run_dir.write_start(args, identity)
    except UserError as error:
        _refuse(store, args, error)
        raise
    if store is not None:
        store.set(_START, json.dumps({"resumed_from": resumed_from}))


def _follow(store: Any, args: Namespace) -> None:
    """Wait for rank 0, on the other ranks. Polls, because a wait in the store blocks signals."""
    import torch

    end = time.monotonic() + _WAIT_SECONDS
    try:
        while not store.check([_START]):
            if time.monotonic() > end:
                raise UserError(f"rank {args.rank} waited {_WAIT_SECONDS:.0f} s for rank 0")
            time.sleep(0.05)
        answer = json.loads(store.get(_START))
        store.add(_HEARD, 1)
    except torch.distributed.DistError as error:
        raise UserError("rank 0 ended before the run began") from error
    if "refused" in answer:
        raise UserError(answer["refused"])
    if answer["resumed_from"] is not None:
        run_dir.go_on(args)


def _store(args: Namespace) -> Any:
    """Return the store that this attempt's ranks share before process groups exist."""
    if args.world_size == 1 or args.fake_process_group:
        return None
    import torch

    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    store, rank, world = next(torch.distributed.rendezvous("env://", timeout=timeout))
    Told.attempt = agree(store, rank, world, timeout.total_seconds())
    return torch.distributed.PrefixStore(Told.attempt, store)


def _refuse(store: Any, args: Namespace, error: UserError) -> None:
    """Tell the other ranks, and wait briefly: the store may end with this rank."""
    if store is None:
        return
    store.set(_START, json.dumps({"refused": str(error)}))
    end = time.monotonic() + _HEARD_SECONDS
    while store.add(_HEARD, 0) < args.world_size - 1 and time.monotonic() < end:
        time.sleep(0.05)
