"""Exact conversions between Megatron's and Hugging Face's tensors of a table row.

Each transform is exact in both directions: ``to_hf`` takes Megatron's tensors and returns Hugging
Face's, ``to_megatron`` is its inverse. Both also work on meta tensors, so that shapes are known
before any data is read.

Shapes: G key/value groups, Q query heads per group, H = G * Q heads, D head dim, F FFN width,
E experts, M hidden size, V tokens. A trailing "..." is M for weights and nothing for biases.
"""

from __future__ import annotations  # listing the targets must not import torch

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megasink.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Transform:
    """Both directions of a row; this base class keeps the tensors as they are."""

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Convert Megatron's tensors to Hugging Face's."""
        return tensors

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Convert Hugging Face's tensors to Megatron's."""
        return tensors


@dataclass(frozen=True)
class GroupedQKV(Transform):
    """linear_qkv, per group [q ... | gate ... | k | v] -> q_proj, (gate), k_proj, v_proj."""

    groups: int
    queries: int
    head_dim: int
    gate: bool = False

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (mixed,) = tensors
        by_group = mixed.reshape(self.groups, -1, self.head_dim, *mixed.shape[1:])
        sizes = [self.queries, self.queries, 1, 1] if self.gate else [self.queries, 1, 1]
        return tuple(part.flatten(0, 2) for part in by_group.split(sizes, dim=1))

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        parts = [t.reshape(self.groups, -1, self.head_dim, *t.shape[1:]) for t in tensors]
        return (_cat(parts, dim=1).flatten(0, 2),)


@dataclass(frozen=True)
class GatedGroupedQKV(GroupedQKV):
    """`GroupedQKV` with a gate, for q_proj [H * 2D, ...] of Qwen: per head [q; gate]."""

    gate: bool = True

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        query, gate, key, value = super().to_hf(*tensors)
        return _interleaved(query, gate, self.head_dim), key, value

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        query_gate, key, value = tensors
        return super().to_megatron(*_separated(query_gate, self.head_dim), key, value)


@dataclass(frozen=True)
class RepeatedGateQKV(GroupedQKV):
    """linear_qkv and linear_gate [H, ...] -> q_proj with each gate row D times, k_proj, v_proj."""

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        mixed, gate = tensors
        query, key, value = super().to_hf(mixed)
        repeated = gate.repeat_interleave(self.head_dim, dim=0)
        return _interleaved(query, repeated, self.head_dim), key, value

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        query_gate, key, value = tensors
        query, repeated = _separated(query_gate, self.head_dim)
        gate = repeated[:: self.head_dim]
        if repeated.device.type != "meta" and not repeated.equal(
            gate.repeat_interleave(self.head_dim, dim=0)
        ):
            raise UserError(
                "the gate rows of a head differ, so its gate is elementwise: import the model with "
                "--gate-granularity elementwise"
            )
        return *super().to_megatron(query, key, value), gate.contiguous()


@dataclass(frozen=True)
class ReversedRotationQKV(GroupedQKV):
    """`GroupedQKV` for RoPE by the opposite angle (nanochat): the halves of heads are exchanged."""

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value = super().to_hf(*tensors)
        return self._exchanged(query), self._exchanged(key), value

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value = tensors
        return super().to_megatron(self._exchanged(query), self._exchanged(key), value)

    def _exchanged(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, 2, self.head_dim // 2)).flip(1).flatten(0, 2)


@dataclass(frozen=True)
class PairedRotationQKV(GroupedQKV):
    """`GroupedQKV` for RoPE of channels 2i and 2i + 1; Megatron pairs i and i + rotated / 2."""

    rotated: int = 0  # channels of a head; the others stay

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value = super().to_hf(*tensors)
        return self._ordered(query, (2, -1)), self._ordered(key, (2, -1)), value

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value = tensors
        both = (self._ordered(rows, (-1, 2)) for rows in (query, key))
        return super().to_megatron(*both, value)

    def _ordered(self, rows: Tensor, shape: tuple[int, int]) -> Tensor:
        heads = rows.unflatten(0, (-1, self.head_dim))
        turned, rest = heads.split((self.rotated, self.head_dim - self.rotated), dim=1)
        turned = turned.unflatten(1, shape).transpose(1, 2).flatten(1, 2)
        return _cat((turned, rest), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class FusedQKV(GroupedQKV):
    """linear_qkv, by group [q ... | k | v] -> qkv_proj: all queries, then all keys, all values."""

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (_cat(super().to_hf(*tensors)),)

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        keys = self.groups * self.head_dim
        return super().to_megatron(*tensors[0].split([self.queries * keys, keys, keys]))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch

    return torch.cat(tuple(tensors), dim=dim)


def _interleaved(query: Tensor, gate: Tensor, head_dim: int) -> Tensor:
    """Combine two [H * D, ...] into [H * 2D, ...], per head [q; gate]."""
    import torch

    by_head = [t.reshape(-1, head_dim, *t.shape[1:]) for t in (query, gate)]
    return torch.stack(by_head, dim=1).flatten(0, 2)


def _separated(query_gate: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Invert `_interleaved`."""
    by_head = query_gate.reshape(-1, 2, head_dim, *query_gate.shape[1:])
    query, gate = by_head.unbind(dim=1)
    return query.flatten(0, 1), gate.flatten(0, 1)


@dataclass(frozen=True)
class GateUp(Transform):
    """linear_fc1 [2F, ...], gate rows first -> gate_proj and up_proj [F, ...]."""

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[0].chunk(2, dim=0)

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (_cat(tensors),)


@dataclass(frozen=True)
class Joined(Transform):
    """Several tensors -> one, whose rows are, group by group, `sizes` rows of each of them."""

    groups: int
    sizes: tuple[int, ...]

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        by_group = [t.unflatten(0, (self.groups, -1)) for t in tensors]
        return (_cat(by_group, dim=1).flatten(0, 1),)

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        by_group = tensors[0].unflatten(0, (self.groups, -1))
        return tuple(part.flatten(0, 1) for part in by_group.split(self.sizes, dim=1))


@dataclass(frozen=True)
class InterleavedGateUp(Transform):
    """linear_fc1 of experts [E, 2F, M] -> [E, M, 2F], gate and up alternating, as in GPT-OSS."""

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        rows = tensors[0].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return (rows if rows.dim() == 2 else rows.transpose(1, 2),)

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        rows = tensors[0] if tensors[0].dim() == 2 else tensors[0].transpose(1, 2)
        return (rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2),)


@dataclass(frozen=True)
class Transposed(Transform):
    """Swap the last two axes."""

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.transpose(-1, -2) for t in tensors)

    to_megatron = to_hf


@dataclass(frozen=True)
class Shifted(Transform):
    """Norm weights plus `by` in Hugging Face; exact between 0.5 and 2, else within one ulp."""

    by: int  # -1 if only Hugging Face stores the weight minus one, 1 if only Megatron does

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t + self.by for t in tensors)

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t - self.by for t in tensors)


@dataclass(frozen=True)
class PaddedRows(Transform):
    """[padded, M] -> [V, M]: drop the padding rows; they come back as zeros."""

    tokens: int
    padded: int

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t[: self.tokens] for t in tensors)

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        missing = self.padded - self.tokens
        return tuple(_cat([t, t.new_zeros(missing, *t.shape[1:])]) for t in tensors)


@dataclass(frozen=True)
class Constant(Transform):
    """A tensor of zeros that Hugging Face's model requires and Megatron's does not have."""

    shape: tuple[int, ...]
    dtype: str

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        import torch

        return (torch.zeros(self.shape, dtype=getattr(torch, self.dtype)),)

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if any(t.device.type != "meta" and bool(t.any()) for t in tensors):
            raise UserError("it is not zero, and megasink's model has no such tensor")
        return ()
