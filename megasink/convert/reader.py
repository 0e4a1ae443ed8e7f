"""Tensors of a torch_dist checkpoint, a layer and an expert at a time, whatever its layout was.

Nothing of the model is built and no process group is needed: the index of the checkpoint says which
bytes of which file hold which part of a tensor.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasink.checkpoint.intact import damage
from megasink.checkpoint.torch_metadata import read_metadata
from megasink.convert.stored_tensor import find_tensor
from megasink.convert.table import LAYERS, NORM_BEFORE_EXPERTS, NORM_OF_LOCAL_SPEC
from megasink.errors import UserError

# What is not the model's: states of optimizers, of the balance loss, of random numbers.
_STATES = ("optimizer.", "chained_", "rng_state", "rerun_state", "common_state", "opt_param_sched")
_HEAD_STATE = ".head_counter."


class MegatronCheckpoint:
    """The weights in a folder iter_NNNNNNN.

    Attributes:
        folder: of the checkpoint.
        shapes: {key: shape} of every weight, the axes of layers and experts included.
        dtypes: {key: dtype}.

    Raises:
        UserError: it is of another format, damaged, or not to be trusted.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        legacy = sorted(folder.glob("mp_rank_*"))
        if legacy and not (folder / ".metadata").is_file():
            raise UserError(
                f"{folder} is in Megatron's old format (--ckpt-format torch), whose files are "
                "pickles of one layout: load it with Megatron and save it once with "
                "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
            )
        if problem := damage(folder):
            raise UserError(f"{folder} is damaged: {problem}")
        metadata = read_metadata(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._parts: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Any]]] = {}
        stored: dict[str, dict[tuple[int, ...], Any]] = defaultdict(dict)
        for index, where in metadata.storage_data.items():
            stored[index.fqn][tuple(index.offset or ())] = where
        for key, entry in metadata.state_dict_metadata.items():
            if not hasattr(entry, "size") or key.startswith(_STATES) or _HEAD_STATE in key:
                continue
            self.shapes[key] = tuple(entry.size)
            self.dtypes[key] = entry.properties.dtype
            self._parts[key] = [
                (tuple(c.offsets), tuple(c.sizes), stored[key][tuple(c.offsets)])
                for c in entry.chunks
            ]
        self._stack_layers()
        self._name_norm_before_experts()

    def _stack_layers(self) -> None:
        """Keys with a number for each layer (layers that differ) as one key with a leading axis."""
        numbered: dict[str, dict[int, str]] = defaultdict(dict)
        for key in list(self.shapes):
            number, _, rest = key.removeprefix(LAYERS).partition(".")
            if key.startswith(LAYERS) and number.isdigit():
                numbered[LAYERS + rest][int(number)] = key
        for key, of_layer in numbered.items():
            shapes = {self.shapes[k] for k in of_layer.values()}
            if len(shapes) > 1 or sorted(of_layer) != list(range(len(of_layer))):
                continue  # layers that are not alike stay as they are, and no row knows them
            first = of_layer[0]
            self.shapes[key] = (len(of_layer), *self.shapes[first])
            self.dtypes[key] = self.dtypes[first]
            self._parts[key] = [
                ((layer, *offsets), (1, *sizes), where)
                for layer, name in of_layer.items()
                for offsets, sizes, where in self._parts[name]
            ]
            for name in of_layer.values():
                del self.shapes[name], self.dtypes[name], self._parts[name]

    def _name_norm_before_experts(self) -> None:
        """One name for it, whatever the spec of the run was; an imported run has it under both."""
        local = NORM_OF_LOCAL_SPEC in self.shapes
        if not local or f"{LAYERS}mlp.linear_fc1.weight" in self.shapes:
            return
        tables: tuple[dict[str, Any], ...] = (self.shapes, self.dtypes, self._parts)
        for table in tables:
            norm = table.pop(NORM_OF_LOCAL_SPEC)
            table.setdefault(NORM_BEFORE_EXPERTS, norm)

    def meta(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """An empty tensor of the shape and dtype of `read`.

        Raises:
            UserError: there is no such weight.
        """
        if key not in self.shapes:
            raise UserError(f"{self.folder} has no {key}")
        shape = self.shapes[key][len(index) :]
        return torch.empty(shape, dtype=self.dtypes[key], device="meta")

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """One weight, or a part of it by leading indices (layer, or layer and expert).

        Raises:
            UserError: the bytes are not there or broken.
        """
        wanted = self.meta(key, index)
        skipped = len(index)
        needed = [part for part in self._parts[key] if _holds(part, index)]
        whole = torch.empty(wanted.shape, dtype=wanted.dtype)
        covered = 0
        for offsets, sizes, where in needed:
            target = whole
            for axis, (offset, size) in enumerate(
                zip(offsets[skipped:], sizes[skipped:], strict=True)
            ):
                target = target.narrow(axis, offset, size)
            at = tuple(i - offset for i, offset in zip(index, offsets, strict=False))
            self._read_part(where, key, sizes, at, target)
            covered += target.numel()
        if covered != whole.numel():
            raise UserError(f"{self.folder}: {key} is not whole: {covered} of {whole.numel()}")
        return whole

    def _read_part(
        self, where: Any, key: str, sizes: tuple[int, ...], at: tuple[int, ...], target: Tensor
    ) -> None:
        """Fill `target` with a stored part of `sizes`, or with what is `at` leading indices of it.

        Raises:
            UserError: the bytes are not there or broken.
        """
        path = self.folder / where.relative_path
        try:
            with path.open("rb", buffering=0) as file:
                stored = find_tensor(file, where.offset, where.length)
                if tuple(stored.shape) != sizes or stored.dtype != target.dtype:
                    raise ValueError(f"it is {stored.dtype} {list(stored.shape)}")
                stored.read_into(file, at, target)
        except Exception as error:  # broken bytes raise anything
            raise UserError(f"{path} cannot be read ({key}): {error}") from error


def _holds(part: tuple[tuple[int, ...], tuple[int, ...], Any], index: tuple[int, ...]) -> bool:
    offsets, sizes, _ = part
    return all(o <= at < o + s for at, o, s in zip(index, offsets, sizes, strict=False))

