"""One rank of many, whose other ranks never answer.

torch's process groups are real (ProcessGroupNCCL on the hollow NCCL). Messages that ranks exchange
through the store or as Python objects are this rank's own, in place of those of all others.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")
from torch.distributed import distributed_c10d

from megasink.plan.hollow.compile_libraries import library

_MANY = b"99999"  # counter values for which a barrier waits


class _Store(dist.Store):
    """A store that already has everything that other ranks would write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.written[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        return self.written.get(key, bytes([7]) * 128)  # the length of NCCL's id of a group

    def add(self, key: str, amount: int) -> int:
        self.written[key] = _MANY
        return int(_MANY)

    def compare_set(self, key: str, expected: str, desired: Any) -> bytes:
        self.set(key, desired)
        return self.get(key)

    def check(self, keys: list[str]) -> bool:
        return True

    def wait(self, *_: Any) -> None:
        return None

    def clone(self) -> Any:
        return self


def be_rank(rank: int, ranks: int) -> None:
    """Make this process rank `rank` of `ranks` from now on; call it before Megatron starts."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(ranks),  # there is no other host to compare with
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    hollow: Any = ctypes.CDLL(library())
    hollow.hollow_split_into(ranks)
    store = _Store()
    init_process_group, new_group = dist.init_process_group, dist.new_group

    def init(*args: Any, **options: Any) -> Any:
        options.pop("init_method", None)
        mine = {"store": store, "rank": rank, "world_size": ranks}
        return init_process_group(*args, **{**options, **mine})

    def group(ranks_of_group: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        members = options.pop("ranks", ranks_of_group)
        hollow.hollow_split_into(len(members) if members else ranks)
        if options.get("backend") == "gloo":  # its ranks would wait for each other
            options |= {"backend": "fake"}
            options.pop("pg_options", None)
        return new_group(members, *args, **options)

    # Parameters have torch's names.
    def gather(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    replaced: dict[str, Any] = {
        "init_process_group": init,
        "new_group": group,
        "rendezvous": lambda *_, **__: iter([(store, rank, ranks)]),
        "all_gather_object": lambda object_list, obj, *_, **__: gather(obj, object_list),
        "gather_object": gather,
        "broadcast_object_list": lambda *_, **__: None,
    }
    for name, function in replaced.items():
        setattr(dist, name, function)
    # One store for all groups: nobody else writes their prefixed names either.
    for module, name, function in (
        (distributed_c10d, "_store_based_barrier", lambda *_, **__: None),
        (distributed_c10d, "PrefixStore", lambda _, inner: inner),
        (dist, "PrefixStore", lambda _, inner: inner),
    ):
        setattr(module, name, function)
