"""Read a checkpoint of any parallel layout, one layer and expert at a time, without a model.

Its index locates each weight; no process group is needed.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasink.checkpoints.damage import refuse_damage
from megasink.checkpoints.find import is_legacy
from megasink.checkpoints.layer_keys import HEAD_STATE, as_gpt_keys
from megasink.checkpoints.stored_tensor import StoredTensor, find_tensor
from megasink.checkpoints.torch_metadata import read_metadata
from megasink.convert.weight_table import LAYERS, NORMS
from megasink.errors import UserError, reason_of

# Entries that are not weights: states of optimizers, random numbers and the balance loss.
_STATES = ("optimizer.", "chained_", "rng_state", "rerun_state", "common_state", "opt_param_sched")


class Box(NamedTuple):
    """A box of a weight, with the axes of layers and experts; `find` locates its data."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    find: Callable[[], StoredTensor]


class Weight(NamedTuple):
    """A whole weight of the model, with the axes of layers and experts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Box]  # boxes that cover it


def torch_dist_weights(folder: Path) -> dict[str, Weight]:
    """Return {key in a GPT model: weight} for all weights in a folder iter_NNNNNNN."""
    refuse_damage(folder)
    metadata = read_metadata(folder)
    stored: dict[str, dict[tuple[int, ...], Any]] = defaultdict(dict)
    for index, where in metadata.storage_data.items():
        stored[index.fqn][tuple(index.offset or ())] = where
    weights = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "size") or key.startswith(_STATES) or HEAD_STATE in key:
            continue
        parts = []
        for chunk in entry.chunks:
            where = stored[key][tuple(chunk.offsets)]
            find = partial(find_tensor, folder / where.relative_path, where.offset, where.length)
            parts.append(Box(tuple(chunk.offsets), tuple(chunk.sizes), find))
        weights[key] = Weight(tuple(entry.size), entry.properties.dtype, parts)
    names = as_gpt_keys(weights)
    weights = {names[key]: weight for key, weight in weights.items()}
    # The norm before experts has one or the other name, or both in an imported run.
    for key in [key for key in weights if key.startswith(LAYERS) and key.endswith(NORMS[1])]:
        if key.replace("layer_norm_weight", "weight") not in weights:
            weights.setdefault(key.replace(*NORMS[::-1]), weights.pop(key))
    _stack_layers(weights)
    return weights


def _stack_layers(weights: dict[str, Weight]) -> None:
    """Merge keys that contain a layer number into one key with a leading axis of layers."""
    numbered: dict[str, dict[int, str]] = defaultdict(dict)
    for key in weights:
        number, _, rest = key.removeprefix(LAYERS).partition(".")
        if key.startswith(LAYERS) and number.isdigit():
            numbered[LAYERS + rest][int(number)] = key
    layers = 1 + max((n for of_layer in numbered.values() for n in of_layer), default=-1)
    for key, of_layer in numbered.items():
        shapes = {weights[name].shape for name in of_layer.values()}
        if len(shapes) > 1 or len(of_layer) < layers:
            continue  # weights in which layers differ keep their names
        first = weights[of_layer[0]]
        parts = [
            Box((layer, *part.offsets), (1, *part.sizes), part.find)
            for layer, name in of_layer.items()
            for part in weights[name].parts
        ]
        weights[key] = Weight((len(of_layer), *first.shape), first.dtype, parts)
        for name in of_layer.values():
            del weights[name]


class MegatronCheckpoint:
    """The weights in a folder iter_NNNNNNN; `shapes` include the axes of layers and experts."""

    def __init__(self, folder: Path):
        self.folder = folder
        if is_legacy(folder):
            raise UserError(
                f"{folder} has Megatron's old format (--ckpt-format torch): convert it to "
                "torch_dist first with megasink train, the flags of its run and --load FOLDER "
                "--ckpt-format torch --ckpt-convert-format torch_dist --ckpt-convert-save NEW "
                "(docs/convert.md)"
            )
        self._weights = torch_dist_weights(folder)
        self.shapes = {key: weight.shape for key, weight in self._weights.items()}

    def meta(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Return a meta tensor of the shape and dtype of `read`."""
        if key not in self._weights:
            raise UserError(f"{self.folder} has no {key}")
        weight = self._weights[key]
        return torch.empty(weight.shape[len(index) :], dtype=weight.dtype, device="meta")

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Read a weight, or its part at the leading indices (layer, or layer and expert)."""
        tensor = torch.empty_like(self.meta(key, index), device="cpu")
        skipped, covered = len(index), 0
        for part in self._weights[key].parts:
            if not _holds(part, index):
                continue
            box = zip(part.offsets[skipped:], part.sizes[skipped:], strict=True)
            target = tensor[tuple(slice(offset, offset + size) for offset, size in box)]
            at = tuple(i - offset for i, offset in zip(index, part.offsets, strict=False))
            self._read_part(key, part, at, target)
            covered += target.numel()
        if covered != tensor.numel():
            raise UserError(
                f"{self.folder}: {key} is incomplete: {covered} of {tensor.numel()} values"
            )
        return tensor

    def _read_part(self, key: str, part: Box, at: tuple[int, ...], target: Tensor) -> None:
        try:
            stored = part.find()
            if torch.Size(stored.shape).numel() != math.prod(part.sizes):
                raise ValueError(f"its shape is {list(stored.shape)}, not {list(part.sizes)}")
            # A single layer may be stored without the axis of layers.
            stored.read_into(at[len(part.sizes) - len(stored.shape) :], target)
        except Exception as error:  # corrupt data raises anything
            raise UserError(f"{self.folder} cannot be read ({key}): {reason_of(error)}") from error


def _holds(part: Box, index: tuple[int, ...]) -> bool:
    boxes = zip(index, part.offsets, part.sizes, strict=False)
    return all(offset <= at < offset + size for at, offset, size in boxes)
