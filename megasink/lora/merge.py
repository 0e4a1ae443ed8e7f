"""Adapters as changes of the base's weights. torch alone.

Shapes: L layers, r rank, I and O inputs and outputs of a target, G key/value groups, Q query heads
per group, D head dim, M hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megasink.lora.targets import GATE, LAYERS, LINEARS, QKV, A, B, is_of_adapter, key_of

_LINEAR_GATE = "self_attention.linear_gate"


def by_group(parts: Sequence[Tensor], groups: int) -> Tensor:
    """Return the rows of linear_qkv, per group [q ... | (gate ... |) k | v].

    Args:
        parts: [rows, ...] of query, (gate,) key and value; a group's rows are contiguous in each.
    """
    grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Sizes:
    """What the order of linear_qkv's rows depends on.

    Attributes:
        groups, queries, head_dim: G, Q, D.
        megatrons_gate: whether linear_qkv has the rows of Megatron's own output gate.
    """

    groups: int
    queries: int
    head_dim: int
    megatrons_gate: bool = False

    def qkv_rows(self) -> dict[str, int]:
        """Return the number of rows of each part of linear_qkv, in their order."""
        query, one = self.groups * self.queries * self.head_dim, self.groups * self.head_dim
        gate = {GATE: query} if self.megatrons_gate else {}
        return {"q_proj": query, **gate, "k_proj": one, "v_proj": one}


@dataclass(frozen=True)
class Adapter:
    """The tensors of a LoRA checkpoint, and how they change the base's weights.

    Attributes:
        tensors: {key: tensor with a leading axis of layers}: A [L, r, I] and B [L, O, r] of each
            target, and what else was trained.
        scaling: alpha / r.
        sizes: of the model.
    """

    tensors: Mapping[str, Tensor]
    scaling: float
    sizes: Sizes

    def targets(self) -> dict[str, str]:
        """Return {target: Megatron's module} of the adapted layers."""
        return {
            target: linear
            for linear, names in LINEARS.items()
            for target in names
            if key_of(linear, target, A) in self.tensors
        }

    def trained_beside(self) -> list[str]:
        """Return the keys of what was trained that is not a matrix A or B."""
        gate = f".lora.{GATE}."
        return [key for key in self.tensors if not is_of_adapter(key) or gate in key]

    def change(self, linear: str, target: str, layer: int) -> Tensor:
        """Return alpha / r B A [O, I] in float32, of a target in a layer."""
        down, up = (self.tensors[key_of(linear, target, m)][layer].float() for m in (A, B))
        return self.scaling * (up @ down)

    def merged(self, key: str, layer: int | None, weight: Tensor) -> Tensor:
        """Return a weight of the adapted model, in the dtype of the base's.

        Args:
            key: in a checkpoint of the base.
            layer: None for a weight outside of the layers.
            weight: the base's, of that layer.
        """
        if layer is None:
            return weight
        if key in self.tensors:
            return self.tensors[key][layer].to(weight.dtype)
        linear, _, kind = key.removeprefix(LAYERS).rpartition(".")
        if linear == QKV:
            change = self._of_qkv(kind, layer, weight)
        elif linear == _LINEAR_GATE:
            change = self._of_gate(kind, layer)
        elif kind == "weight" and linear in LINEARS:
            change = self._of(linear, layer, weight)
        else:
            return weight
        return weight if change is None else (weight.float() + change).to(weight.dtype)

    def _of(self, linear: str, layer: int, weight: Tensor) -> Tensor | None:
        names = LINEARS[linear]
        own = [target for target in names if key_of(linear, target, A) in self.tensors]
        if not own:
            return None
        rows = self.tensors[key_of(linear, own[0], B)].shape[1]
        if rows == len(weight):
            return self.change(linear, own[0], layer)
        return torch.cat(
            [
                self.change(linear, target, layer)
                if target in own
                else weight.new_zeros(rows, weight.shape[1], dtype=torch.float32)
                for target in names
            ]
        )

    def _of_qkv(self, kind: str, layer: int, weight: Tensor) -> Tensor | None:
        parts, found = [], False
        for name, rows in self.sizes.qkv_rows().items():
            part = None
            if name == GATE:
                part = self._of_gate(kind, layer)
            elif kind == "weight" and key_of(QKV, name, A) in self.tensors:
                part = self.change(QKV, name, layer)
            found |= part is not None
            zeros = weight.new_zeros(rows, *weight.shape[1:], dtype=torch.float32)
            parts.append(zeros if part is None else part)
        return by_group(parts, self.sizes.groups) if found else None

    def _of_gate(self, kind: str, layer: int) -> Tensor | None:
        change = self.tensors.get(key_of(QKV, GATE, kind))
        return None if change is None else change[layer].float()
