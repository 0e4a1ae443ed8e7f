"""Start a run on every rank: rank 0 inspects the run folder, and the others follow its decision.

Other ranks must not inspect it themselves: rank 0 may be moving damaged checkpoints aside, and a
shared file system shows one host's changes to others later.
"""

import json
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megasink.errors import UserError
from megasink.training import hosts, run_dir
from megasink.training.attempt import open_store
from megasink.training.lease import Lease
from megasink.training.stop import RankState
from megasink.training.waiting import on_several_hosts, waiting

# Verifying a large checkpoint, or waiting for another host's lease, may take rank 0 a while.
_WAIT_SECONDS = 3600.0


@contextmanager
def starting(args: Namespace, identity: dict[str, Any]) -> Iterator[Any]:
    """Hold the run folder's lease, and set ``args`` to resume from the same step on every rank.

    Yields the store for Megatron's process groups, separate for each attempt (attempt.py), because
    torchrun's survives a restart of the ranks; None for a single rank. If rank 0 cannot start,
    every rank raises the same error.
    """
    store = None
    if args.world_size > 1 and not args.fake_process_group:
        store = open_store(60.0 * args.distributed_timeout_minutes)
    together = store is not None and on_several_hosts()
    if args.run_dir is None and not together:
        RankState.begun = True
        yield store
        return
    if args.rank:
        _follow(store, args, together)
        RankState.begun = True
        yield store
        return
    with ExitStack() as held:
        try:
            if args.run_dir is not None:
                lease = Lease(Path(args.run_dir))
                RankState.release = lease.release
                held.callback(lease.release)
            if together:
                hosts.compare(store, args)
            resumed_from = _begin(args, identity)
        except UserError as error:
            if store is not None:
                hosts.refuse(store, args.world_size, error)
            raise
        if store is not None:
            store.set(hosts.START, json.dumps({"resumed_from": resumed_from}))
        RankState.begun = True
        yield store


def _begin(args: Namespace, identity: dict[str, Any]) -> int | None:
    """Record the start on rank 0, which holds the lease; return the step that it resumes from."""
    if args.run_dir is None:
        return None
    # Another trainer may have used the folder since the arguments were checked.
    if problem := run_dir.folder_problem(Path(args.run_dir), resume=args.resume):
        raise UserError(problem)
    return run_dir.write_start(args, identity)


def _follow(store: Any, args: Namespace, together: bool) -> None:
    """Wait for rank 0, on the other ranks. Polls, because a wait in the store blocks signals."""
    import torch

    end = time.monotonic() + _WAIT_SECONDS
    try:
        if together:
            hosts.answer(store, args)
        with waiting(lambda: f"rank 0 on {os.environ['MASTER_ADDR']} to start"):
            while not store.check([hosts.START]):
                if time.monotonic() > end:
                    raise UserError(f"rank {args.rank} waited {_WAIT_SECONDS:.0f} s for rank 0")
                time.sleep(0.05)
        answer = json.loads(store.get(hosts.START))
        store.add(hosts.HEARD, 1)
    except (torch.distributed.DistError, OSError) as error:
        master = os.environ["MASTER_ADDR"]
        raise UserError(f"rank 0 on {master} ended before the run began: see its log") from error
    if "refused" in answer:
        raise UserError(answer["refused"])
    if answer["resumed_from"] is not None:
        run_dir.go_on(args)
