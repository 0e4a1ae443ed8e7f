"""Read a checkpoint of any parallel layout, one layer and expert at a time."""

import math
from pathlib import Path

import torch
from torch import Tensor

from megasink.checkpoints.find import is_legacy
from megasink.convert.table import LAYERS, NORM_BEFORE_EXPERTS, NORM_OF_LOCAL_SPEC
from megasink.convert.torch_dist_weights import Box, torch_dist_weights
from megasink.errors import UserError, reason_of


class MegatronCheckpoint:
    """The weights in a folder iter_NNNNNNN of the torch_dist format.

    Attributes:
        folder: the checkpoint.
        shapes: {key: shape} of all weights, including the axes of layers and experts.

    Raises:
        UserError: the checkpoint is damaged, untrusted, or of another format.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if is_legacy(folder):
            raise UserError(
                f"{folder} has Megatron's old format (--ckpt-format torch): make a torch_dist "
                "checkpoint of it first, with the flags of its run and megasink train --load "
                "FOLDER --ckpt-format torch --ckpt-convert-format torch_dist --ckpt-convert-save "
                "NEW (docs/convert.md)"
            )
        self._weights = torch_dist_weights(folder)
        if f"{LAYERS}mlp.linear_fc1.weight" not in self._weights:
            # The norm before experts has one or the other name, or both in an imported run.
            norm = self._weights.pop(NORM_OF_LOCAL_SPEC, None)
            if norm is not None:
                self._weights.setdefault(NORM_BEFORE_EXPERTS, norm)
        self.shapes = {key: weight.shape for key, weight in self._weights.items()}

    def meta(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Return a meta tensor of the shape and dtype of `read`.

        Raises:
            UserError: the checkpoint has no such weight.
        """
        if key not in self._weights:
            raise UserError(f"{self.folder} has no {key}")
        weight = self._weights[key]
        return torch.empty(weight.shape[len(index) :], dtype=weight.dtype, device="meta")

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Read a weight, or its part at the leading indices (layer, or layer and expert).

        Raises:
            UserError: the data is missing or corrupt.
        """
        whole = torch.empty_like(self.meta(key, index), device="cpu")
        skipped, covered = len(index), 0
        for part in self._weights[key].parts:
            if not _holds(part, index):
                continue
            box = zip(part.offsets[skipped:], part.sizes[skipped:], strict=True)
            target = whole[tuple(slice(offset, offset + size) for offset, size in box)]
            at = tuple(i - offset for i, offset in zip(index, part.offsets, strict=False))
            self._read_part(key, part, at, target)
            covered += target.numel()
        if covered != whole.numel():
            raise UserError(
                f"{self.folder}: {key} is incomplete: {covered} of {whole.numel()} values"
            )
        return whole

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
