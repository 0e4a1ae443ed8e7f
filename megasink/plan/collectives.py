"""The communication of a step: every call of torch.distributed, with its group and its caller."""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from megasink.plan.whole_job import BALANCE

# Names in parallel_state of Megatron's process groups, and their names here. Where
# two names stand for the same ranks, the first counts. Others keep their names.
_GROUPS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "TP",
    "_CONTEXT_PARALLEL_GROUP": "CP",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "PP",
    "_EXPERT_MODEL_PARALLEL_GROUP": "EP",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "ETP",
    "_EXPERT_DATA_PARALLEL_GROUP": "EDP",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "ETP x EP",
    "_DATA_PARALLEL_GROUP": "DP",
    "_DATA_PARALLEL_GROUP_WITH_CP": "DP x CP",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "TP x CP",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "TP x DP",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "TP x DP x CP",
    "_MODEL_PARALLEL_GROUP": "TP x PP",
    "_EMBEDDING_GROUP": "embedding",
}
_SINGLE = {label for label in _GROUPS.values() if " " not in label}
# Operator of c10d -> (name, bytes that a rank sends in a ring of n ranks, for each byte of the
# message). A message is the larger of input and output.
_KINDS: dict[str, tuple[str, Any]] = {
    "allreduce_": ("all-reduce", lambda n: 2 * (n - 1) / n),
    "allgather_": ("all-gather", lambda n: (n - 1) / n),
    "reduce_scatter_": ("reduce-scatter", lambda n: (n - 1) / n),
    "alltoall_": ("all-to-all", lambda n: (n - 1) / n),
    "broadcast_": ("broadcast", lambda n: 1.0),
    "reduce_": ("reduce", lambda n: 1.0),
    "send": ("send", lambda n: 1.0),
    "recv_": ("receive", lambda n: 0.0),
    "barrier": ("barrier", lambda n: 0.0),
}
_VARIANT = re.compile(r"^_|(base|coalesced|into_tensor_coalesced|tensor_coalesced)_$")
# Package of the product's innermost module in the stack -> purpose. By the names of modules:
# a clone may lie in a folder of any name.
_PURPOSES = {"megasink.balance": BALANCE, "megasink": "megasink", "megatron": "Megatron"}


# A kind of call: the name of the process group, its size, all-reduce and so on, and `BALANCE`,
# "megasink" or "Megatron".
_CALL = ("group", "ranks", "kind", "purpose")


class Collectives(TorchDispatchMode):
    """Context manager that counts the calls of its body, in every thread, also in backward."""

    # Groups of one rank are left out: nothing is sent. In the table, "messages" has their bytes,
    # and "sent" those that this rank sends with ring algorithms.

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[tuple[str, int, str, str], Counter[str]] = {}
        self._names = group_names()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            self._count(func.__name__.partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, args: Iterable[Any]) -> None:
        group, size = None, 0
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                if "ProcessGroup" in str(arg._type()):
                    group = ProcessGroup.unbox(arg)
            else:
                size = max(size, _bytes(arg))
        if group is None or group.size() == 1:
            return
        operator = _VARIANT.sub("", operator)
        if operator not in _KINDS:
            raise NotImplementedError(f"c10d::{operator}: missing in megasink/plan/collectives.py")
        kind, factor = _KINDS[operator]
        if operator in ("send", "recv_"):
            # With two stages Megatron's pipeline sends in the group of all ranks, too.
            group = parallel_state.get_pipeline_model_parallel_group()
        ranks = group.size()
        call = (self._names.get(group.group_name, "other"), ranks, kind, _purpose())
        sums = self._sums.setdefault(call, Counter())
        sums.update(calls=1, messages=size, sent=round(size * factor(ranks)))

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each kind of call, with calls, messages and sent."""
        return [
            {**dict(zip(_CALL, call, strict=True)), **sums} for call, sums in self._sums.items()
        ]


def group_names() -> dict[str, str]:
    """Return {name in torch: name here} of Megatron's process groups."""
    state: Mapping[str, Any] = vars(parallel_state)
    groups = {name: group for name, group in state.items() if isinstance(group, ProcessGroup)}
    world = torch.distributed.group.WORLD
    assert world is not None
    names: dict[str, str] = {}
    sizes = {_GROUPS[n]: g.size() for n, g in groups.items() if _GROUPS.get(n) in _SINGLE}
    for name, label in _GROUPS.items():
        if name in groups:
            of_several = [one for one in label.split(" x ") if sizes.get(one, 2) > 1]
            names.setdefault(groups[name].group_name, " x ".join(of_several) or label)
    for name, group in groups.items():
        plain = "all ranks" if group.size() == world.size() else name.strip("_").lower()
        names.setdefault(group.group_name, plain.removesuffix("_group"))
    names.setdefault(world.group_name, "all ranks")
    return names


def _bytes(arg: Any) -> int:
    if isinstance(arg, torch.Tensor):
        return int(arg.nbytes)
    if isinstance(arg, list | tuple):
        return sum(map(_bytes, arg))
    return 0


def in_package(module: str, *packages: str) -> bool:
    """Return whether a module is one of these packages, or in one."""
    return f"{module}.".startswith(tuple(f"{package}." for package in packages))


def _purpose() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not in_package(module, "megasink.plan"):
            for package, purpose in _PURPOSES.items():
                if in_package(module, package):
                    return purpose
        frame = frame.f_back
    return "other"
