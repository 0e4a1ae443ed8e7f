"""Every collective of the code inside a block, seen where torch dispatches it."""

from collections import Counter
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Counts (operation, bytes, ranks) of every message between ranks, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            group = next(ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
            size = sum(x.nbytes for x in tensors if torch.is_tensor(x))
            self.found[func.name().removeprefix("c10d::"), size, group.size()] += 1
        return func(*args, **(kwargs or {}))
