"""Tensors of a checkpoint, a layer and an expert at a time, whatever its layout was."""

import math
from pathlib import Path

import torch
from torch import Tensor

from megasink.checkpoint.legacy import is_legacy
from megasink.convert.legacy_weights import legacy_weights
from megasink.convert.stored_weights import Part
from megasink.convert.table import LAYERS, NORM_BEFORE_EXPERTS, NORM_OF_LOCAL_SPEC
from megasink.convert.torch_dist_weights import torch_dist_weights
from megasink.errors import UserError


class MegatronCheckpoint:
    """The weights in a folder iter_NNNNNNN, of the torch_dist format or the old one.

    Attributes:
        folder: of the checkpoint.
        shapes: {key: shape} of every weight, the axes of layers and experts included.

    Raises:
        UserError: it is of another format, damaged, or not to be trusted.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._weights = legacy_weights(folder) if is_legacy(folder) else torch_dist_weights(folder)
        self._name_norm_before_experts()
        self.shapes = {key: weight.shape for key, weight in self._weights.items()}

    def _name_norm_before_experts(self) -> None:
        """One name for it, whatever the spec of the run was; an imported run has it under both."""
        if f"{LAYERS}mlp.linear_fc1.weight" in self._weights:
            return
        norm = self._weights.pop(NORM_OF_LOCAL_SPEC, None)
        if norm is not None:
            self._weights.setdefault(NORM_BEFORE_EXPERTS, norm)

    def meta(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """An empty tensor of the shape and dtype of `read`.

        Raises:
            UserError: there is no such weight.
        """
        if key not in self._weights:
            raise UserError(f"{self.folder} has no {key}")
        weight = self._weights[key]
        return torch.empty(weight.shape[len(index) :], dtype=weight.dtype, device="meta")

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """One weight, or a part of it by leading indices (layer, or layer and expert).

        Raises:
            UserError: the bytes are not there or broken.
        """
        whole = torch.empty_like(self.meta(key, index), device="cpu")
        skipped, covered = len(index), 0
        for part in self._weights[key].parts:
            if not _holds(part, index):
                continue
            target = whole
            for axis, (offset, size) in enumerate(
                zip(part.offsets[skipped:], part.sizes[skipped:], strict=True)
            ):
                target = target.narrow(axis, offset, size)
            at = tuple(i - offset for i, offset in zip(index, part.offsets, strict=False))
            self._read_part(key, part, at, target)
            covered += target.numel()
        if covered != whole.numel():
            raise UserError(f"{self.folder}: {key} is not whole: {covered} of {whole.numel()}")
        return whole

    def _read_part(self, key: str, part: Part, at: tuple[int, ...], target: Tensor) -> None:
        try:
            stored = part.find()
            if torch.Size(stored.shape).numel() != math.prod(part.sizes):
                raise ValueError(f"it is {list(stored.shape)}, not {list(part.sizes)}")
            # A tensor of one layer may be stored without an axis of layers.
            stored.read_into(at[len(part.sizes) - len(stored.shape) :], target)
        except Exception as error:  # broken bytes raise anything
            raise UserError(f"{self.folder} cannot be read ({key}): {error}") from error


def _holds(part: Part, index: tuple[int, ...]) -> bool:
    boxes = zip(index, part.offsets, part.sizes, strict=False)
    return all(offset <= at < offset + size for at, offset, size in boxes)
