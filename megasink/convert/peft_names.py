"""Where the matrices of an adapter are in peft: modules of the Hugging Face model, rows of B."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megasink.convert.adapted import sizes_of
from megasink.convert.architecture import Architecture
from megasink.convert.table import LAYERS, Row
from megasink.convert.targets.target import Target
from megasink.convert.transforms import (
    GatedGroupedQKV,
    GateUp,
    GroupedQKV,
    RepeatedGateQKV,
    Transform,
)
from megasink.errors import UserError
from megasink.lora.merge import by_group
from megasink.lora.targets import LINEARS, QKV

# Transforms that only move rows, so that they apply to B and leave A.
_OF_ROWS = (Transform, GroupedQKV, GatedGroupedQKV, RepeatedGateQKV, GateUp)
PREFIX = "base_model.model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Which base an adapter was exported for, in a file that peft does not read.
FINGERPRINT = "megasink_base.json"


@dataclass(frozen=True)
class Place:
    """A LoRA target in the Hugging Face model.

    Attributes:
        linear: Megatron's module.
        target: its name in --lora-targets.
        module: the module in Hugging Face's model, with ``{layer}``.
        row: of the conversion table.
        part: index of the module among the row's.
    """

    linear: str
    target: str
    module: str
    row: Row
    part: int

    def to_hf(self, up: Tensor, model: Architecture) -> Tensor:
        """Return B [O, r] with the rows of Hugging Face's module, given Megatron's."""
        own = self._own_parts(up, model)
        # The headwise gate that some targets store in q_proj.
        others = [up.new_zeros(model.heads, up.shape[1]) for _ in self.row.megatron[1:]]
        whole = by_group(own, model.groups) if self.linear == QKV else torch.cat(own)
        return self.row.transform.to_hf(whole, *others)[self.part].contiguous()

    def to_megatron(self, up: Tensor, model: Architecture) -> Tensor:
        """Invert `to_hf`; a B of another model's size is returned as it is.

        Raises:
            UserError: B changes rows of a gate, which --lora-targets cannot name.
        """
        if self.linear != QKV:
            return up
        rows = sizes_of(model).qkv_rows()[self.target]
        like = self.to_hf(up.new_zeros(rows, up.shape[1]), model)
        if len(like) == rows or like.shape != up.shape:
            return up
        # q_proj has the rows of the gate too, per head [query; gate].
        query, gate = up.reshape(-1, 2, model.head_dim, up.shape[1]).unbind(dim=1)
        if bool(gate.any()):
            raise UserError(
                f"{self.module}: the adapter changes the gate, which LoRA here does not"
            )
        return query.flatten(0, 1)

    def _own_parts(self, up: Tensor, model: Architecture) -> list[Tensor]:
        """Return the parts of the whole layer's rows, zero but for the target's."""
        names = LINEARS[self.linear]
        if self.linear == QKV:
            rows = sizes_of(model).qkv_rows()
        elif len(names) == 1 or not model.options.gated_unit:
            return [up]
        else:
            rows = dict.fromkeys(names, len(up))
        return [
            up if name == self.target else up.new_zeros(count, up.shape[1])
            for name, count in rows.items()
        ]


def places(target: Target, model: Architecture) -> dict[str, Place]:
    """Return {name in --lora-targets: place} of every target that a model has.

    Raises:
        UserError: the architecture stores a layer in a form that an adapter cannot follow.
    """
    found = {}
    for linear, names in LINEARS.items():
        key = f"{LAYERS}{linear}.weight"
        rows = [row for row in target.table(model) if row.megatron[:1] == (key,)]
        if not rows:
            continue
        (row,) = rows
        if type(row.transform) not in _OF_ROWS or len(row.hf) > len(names):
            raise UserError(
                f"--target {target.name} stores {linear} in a form of its own: adapters for it "
                "cannot be converted; export the merged model"
            )
        modules = [name.removesuffix(".weight") for name in row.hf]
        # A plain FFN has no gate projection.
        for part, (name, module) in enumerate(zip(names[-len(modules) :], modules, strict=True)):
            found[name] = Place(linear, name, module, row, part)
    return found
