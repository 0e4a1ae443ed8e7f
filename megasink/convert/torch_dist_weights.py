"""Locate the weights of a torch_dist checkpoint by its index, without a model or process group."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megasink.checkpoints.intact import refuse_damage
from megasink.checkpoints.stored_tensor import StoredTensor, find_tensor
from megasink.checkpoints.torch_metadata import read_metadata
from megasink.convert.table import LAYERS

# Entries that are not weights: states of optimizers, random numbers and the balance loss.
_STATES = ("optimizer.", "chained_", "rng_state", "rerun_state", "common_state", "opt_param_sched")
_HEAD_STATE = ".head_counter."


class Box(NamedTuple):
    """A box of a weight.

    Attributes:
        offsets, sizes: of the box, including the axes of layers and experts.
        find: locates the data, which may lack leading axes of size one; raises exceptions of any
            type if the data is corrupt.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    find: Callable[[], StoredTensor]


class Weight(NamedTuple):
    """A weight of the model.

    Attributes:
        shape, dtype: of the whole weight, including the axes of layers and experts.
        parts: boxes that cover it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Box]


def torch_dist_weights(folder: Path) -> dict[str, Weight]:
    """Return {key: weight} for all weights in a folder iter_NNNNNNN.

    Raises:
        UserError: the checkpoint is damaged, untrusted, or of another format.
    """
    refuse_damage(folder)
    metadata = read_metadata(folder)
    stored: dict[str, dict[tuple[int, ...], Any]] = defaultdict(dict)
    for index, where in metadata.storage_data.items():
        stored[index.fqn][tuple(index.offset or ())] = where
    found = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "size") or key.startswith(_STATES) or _HEAD_STATE in key:
            continue
        parts = []
        for chunk in entry.chunks:
            where = stored[key][tuple(chunk.offsets)]
            find = partial(find_tensor, folder / where.relative_path, where.offset, where.length)
            parts.append(Box(tuple(chunk.offsets), tuple(chunk.sizes), find))
        found[key] = Weight(tuple(entry.size), entry.properties.dtype, parts)
    _stack_layers(found)
    return found


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
