"""How the tensors of a row of the table differ between Megatron and Hugging Face.

Each transform is exact in both directions. ``to_hf`` takes the tensors that Megatron stores and
gives those of Hugging Face; ``to_megatron`` is its inverse. They work on meta tensors too, so that
shapes are known before a byte is read.

Shapes: G key/value groups, Q query heads of each, H = G * Q heads, D head dim, F width of the FFN,
E experts, M hidden size, V tokens. A trailing "..." is M for weights and nothing for biases.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megasink.errors import UserError


class Transform(Protocol):
    """Both directions of one row."""

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Megatron's tensors -> Hugging Face's."""

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Hugging Face's tensors -> Megatron's."""


@dataclass(frozen=True)
class Same:
    """The tensors as they are."""

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors


@dataclass(frozen=True)
class GroupedQKV:
    """linear_qkv, by group [q ... | k | v] -> q_proj [H * D, ...], k_proj, v_proj [G * D, ...].

    With Megatron's output gate, by group [q ... | gate ... | k | v] -> q, gate [H * D, ...], k, v.
    """

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
        return (torch.cat(parts, dim=1).flatten(0, 2),)


@dataclass(frozen=True)
class GatedGroupedQKV:
    """As `GroupedQKV` with a gate, for q_proj [H * 2D, ...] that is by head [q; gate].

    Qwen3-Next and Qwen3.5 have it so.
    """

    groups: int
    queries: int
    head_dim: int

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        query, gate, key, value = self._grouped.to_hf(*tensors)
        return _interleaved(query, gate, self.head_dim), key, value

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        query_gate, key, value = tensors
        return self._grouped.to_megatron(*_separated(query_gate, self.head_dim), key, value)

    @property
    def _grouped(self) -> GroupedQKV:
        return GroupedQKV(self.groups, self.queries, self.head_dim, gate=True)


@dataclass(frozen=True)
class RepeatedGateQKV:
    """linear_qkv and linear_gate [H, ...] -> q_proj with each gate row D times, k_proj, v_proj.

    An elementwise gate whose D rows are equal is a headwise gate.
    """

    groups: int
    queries: int
    head_dim: int

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        mixed, gate = tensors
        query, key, value = GroupedQKV(self.groups, self.queries, self.head_dim).to_hf(mixed)
        repeated = gate.repeat_interleave(self.head_dim, dim=0)
        return _interleaved(query, repeated, self.head_dim), key, value

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        query_gate, key, value = tensors
        query, repeated = _separated(query_gate, self.head_dim)
        gate = repeated[:: self.head_dim]
        if repeated.device.type != "meta" and not torch.equal(
            repeated, gate.repeat_interleave(self.head_dim, dim=0)
        ):
            raise UserError(
                "the gate rows of a head differ from each other: it is no headwise gate; "
                "import it with --gate-granularity elementwise"
            )
        plain = GroupedQKV(self.groups, self.queries, self.head_dim)
        return *plain.to_megatron(query, key, value), gate.contiguous()


def _interleaved(query: Tensor, gate: Tensor, head_dim: int) -> Tensor:
    """[H * D, ...] of each -> [H * 2D, ...], by head [q; gate]."""
    by_head = [t.reshape(-1, head_dim, *t.shape[1:]) for t in (query, gate)]
    return torch.stack(by_head, dim=1).flatten(0, 2)


def _separated(query_gate: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The inverse of `_interleaved`."""
    by_head = query_gate.reshape(-1, 2, head_dim, *query_gate.shape[1:])
    query, gate = by_head.unbind(dim=1)
    return query.flatten(0, 1), gate.flatten(0, 1)


@dataclass(frozen=True)
class GateUp:
    """linear_fc1 [2F, ...], the gate's rows first -> gate_proj and up_proj [F, ...]."""

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[0].chunk(2, dim=0)

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat(tensors, dim=0),)


@dataclass(frozen=True)
class InterleavedGateUp:
    """linear_fc1 of experts [E, 2F, M] -> [E, M, 2F] with gate and up columns in turn (GPT-OSS)."""

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (weight,) = tensors
        experts, rows, hidden = weight.shape
        in_turn = weight.reshape(experts, 2, rows // 2, hidden).transpose(1, 2)
        return (in_turn.reshape(experts, rows, hidden).transpose(1, 2),)

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        in_turn = tensors[0].transpose(1, 2)
        experts, rows, hidden = in_turn.shape
        halves = in_turn.reshape(experts, rows // 2, 2, hidden).transpose(1, 2)
        return (halves.reshape(experts, rows, hidden),)


@dataclass(frozen=True)
class Transposed:
    """The last two axes exchanged."""

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.transpose(-1, -2) for t in tensors)

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.transpose(-1, -2) for t in tensors)


@dataclass(frozen=True)
class Shifted:
    """Weights of a norm: Hugging Face's are Megatron's plus `by`.

    -1 where only Hugging Face stores the weight minus one, 1 where only Megatron does
    (``--apply-layernorm-1p``). Exact for weights between 0.5 and 2, else within one unit in the
    last place.
    """

    by: int

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t + self.by for t in tensors)

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t - self.by for t in tensors)


@dataclass(frozen=True)
class PaddedRows:
    """Rows [padded, M] -> [V, M]: those that no token has go, and come back as zeros."""

    tokens: int
    padded: int

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t[: self.tokens] for t in tensors)

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        missing = self.padded - self.tokens
        return tuple(torch.cat([t, t.new_zeros(missing, *t.shape[1:])]) for t in tensors)


@dataclass(frozen=True)
class Constant:
    """A tensor of zeros that Hugging Face's model needs and Megatron's does not have."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def to_hf(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros(self.shape, dtype=self.dtype),)

    def to_megatron(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if any(t.device.type != "meta" and bool(t.any()) for t in tensors):
            raise UserError("it is not zero, and Megatron's model here has no place for it")
        return ()
