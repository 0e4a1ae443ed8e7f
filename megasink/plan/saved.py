"""Tensors saved for backward, by the module that saved them, on any device.

What counts is storage: of several tensors that share one, it counts for the module that saved it
first. What is there after the step as well (weights, tables of RoPE) is not counted.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks

_LAYER = re.compile(r"^(?:module\.)*(decoder|mtp)\.layers\.\d+\.?")
_WRAPPERS = re.compile(r"^(module(\.|$))+")
_NUMBER = re.compile(r"\.\d+\b")


@dataclass
class Saved:
    """What the modules of one name save in one microbatch.

    Attributes:
        module: Name; inside of a layer without the layer's own.
        kind: Name of its class.
        layers: Number of layers with such a module, on this rank; 0 outside of layers.
        bytes: Saved by all of them.
    """

    module: str
    kind: str
    layers: int
    bytes: int


@dataclass
class _Storage:
    ref: Any
    place: str
    size: int = 0


class SavedTensors:
    """Context manager around a step; `watching` is the one around each forward pass.

    Args:
        models: The model chunks of this rank.
        device: "cuda" or "cpu": tensors elsewhere do not count.
    """

    def __init__(self, models: Iterable[Any], device: str):
        self._device = device
        self._places = {
            id(module): name for model in models for name, module in model.named_modules()
        }
        self._kinds = {
            name: type(module).__name__
            for model in models
            for name, module in model.named_modules()
        }
        self._inside: list[str] = []
        self._storages: dict[int, _Storage] = {}

    def __enter__(self) -> Self:
        self._hooks = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what a forward pass saves, as large as it is at the end of the pass."""
        known = set(self._storages)
        # The tensor itself is no different from what autograd would keep.
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield
        for key, storage in self._storages.items():
            if key not in known:
                storage.size = _size(storage.ref)

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == self._device:
            ref = StorageWeakRef(tensor.untyped_storage())
            if ref.cdata not in self._storages:
                place = self._inside[-1] if self._inside else ""
                self._storages[ref.cdata] = _Storage(ref, place)
        return tensor

    def _enter(self, module: Any, _: Any) -> None:
        # Modules that are no part of the model belong to the one around them.
        around = self._inside[-1] if self._inside else ""
        self._inside.append(self._places.get(id(module), around))

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def table(self, microbatches: int) -> list[dict[str, Any]]:
        """Return a row (`Saved`) for each name, after a step of so many equal microbatches."""
        rows: dict[tuple[str, str], Saved] = {}
        places: dict[tuple[str, str], set[str]] = {}
        for storage in self._storages.values():
            if not storage.ref.expired():
                continue
            in_layer = _LAYER.match(storage.place)
            pattern = _LAYER if in_layer else _WRAPPERS
            name, kind = pattern.sub("", storage.place), self._kinds.get(storage.place, "")
            name = _NUMBER.sub(".*", name)  # of experts
            row = rows.setdefault((name, kind), Saved(name, kind, 0, 0))
            row.bytes += storage.size
            if in_layer:
                places.setdefault((name, kind), set()).add(in_layer.group())
        for what, row in rows.items():
            row.layers = len(places.get(what, ()))
            row.bytes //= microbatches
        return [asdict(row) for row in rows.values()]


def _size(ref: Any) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return 0 if storage is None else int(storage.nbytes())
