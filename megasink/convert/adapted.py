"""Weights to be exported: those of a checkpoint, or of a base with its adapter merged."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megasink.checkpoints.adapter import base_of, read_adapter
from megasink.checkpoints.find import Checkpoint
from megasink.convert.architecture import Architecture
from megasink.convert.megatron_reader import MegatronCheckpoint
from megasink.convert.table import LAYERS
from megasink.lora.merge import Adapter, Sizes
from megasink.lora.targets import is_lora


class AdaptedCheckpoint(MegatronCheckpoint):
    """The weights of a LoRA run's model, merged when they are read.

    Raises:
        UserError: base or adapter is damaged, untrusted or gone.
    """

    def __init__(self, found: Checkpoint, saved: Mapping[str, Any], model: Architecture):
        super().__init__(base_of(found.config))
        self._adapter = adapter_of(found, saved, model)

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Read a merged weight, in the dtype of the base's; see `MegatronCheckpoint.read`."""
        layer = index[0] if key.startswith(LAYERS) else None
        return self._adapter.merged(key, layer, super().read(key, index))


def weights_of(
    found: Checkpoint, saved: Mapping[str, Any], model: Architecture
) -> MegatronCheckpoint:
    """Open the weights of a run.

    Args:
        saved: the run's arguments.
        model: what they describe.
    """
    if is_lora(saved):
        return AdaptedCheckpoint(found, saved, model)
    return MegatronCheckpoint(found.folder)


def adapter_of(found: Checkpoint, saved: Mapping[str, Any], model: Architecture) -> Adapter:
    """Read the adapter of a LoRA run."""
    return read_adapter(found, saved, sizes_of(model))


def sizes_of(model: Architecture) -> Sizes:
    """Return what the order of linear_qkv's rows depends on."""
    return Sizes(model.groups, model.queries, model.head_dim, model.megatrons_gate)
