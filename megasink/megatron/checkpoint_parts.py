"""The tensors of a parameter in checkpoints: two of a projection with gate rows, no padding."""

from collections.abc import Iterator

import torch
from megatron.core.dist_checkpointing.mapping import (
    ReplicaId,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor


def named_parts(
    name: str, parameter: Tensor, tensor: Tensor | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors stored in a parameter: two if it has gate rows, else one.

    Padding rows are in none. A parameter with `sections` (delta_net.py) has one per section. Gate
    rows of ``...linear_qkv...`` are named ``...linear_gate...``. `tensor` is a gradient or
    optimizer state of the parameter's shape; None for the values.
    """
    tensor = parameter.data if tensor is None else tensor
    sections: dict[str, int] | None = getattr(parameter, "sections", None)
    if sections is not None:
        for section, part in zip(sections, tensor.split([*sections.values()]), strict=True):
            yield f"{name}.{section}", part
        return
    rows: tuple[int, int, int] | None = getattr(parameter, "row_split", None)
    if rows is None:
        yield name, tensor
        return
    mixed, gate, _ = tensor.split(rows)
    yield name, mixed
    yield _part_key(name, parameter.row_part), gate  # type: ignore[attr-defined]


def _part_key(key: str, part: str) -> str:
    assert "linear_qkv." in key, key
    return key.replace("linear_qkv.", part)


def two_tensors(
    projection: ShardedTensor, rows: tuple[int, int, int], part: str
) -> ShardedTensorFactory:
    """Return a factory that splits a sharded tensor, and its optimizer states in the same way."""
    prepended = projection.prepend_axis_num
    axis = prepended  # axis 0 of the parameter, after the layer axes
    ranks = projection.axis_fragmentations[axis]
    rank = projection.global_offset[axis] // projection.local_shape[0]
    others = [
        (index, projection.global_offset[index], projection.axis_fragmentations[index])
        for index in range(prepended)
    ]

    @torch.no_grad()
    def build(
        key: str, tensor: Tensor, replica_id: ReplicaId, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        assert flattened_range is None, "gate rows cannot be split off flattened optimizer states"
        parts = tensor.split(rows)[:2]
        return [
            ShardedTensor.from_rank_offsets(
                part_key,
                values,
                *others,
                (axis, rank, ranks),
                replica_id=replica_id,
                prepend_axis_num=prepended,
            )
            for part_key, values in zip((key, _part_key(key, part)), parts, strict=True)
        ]

    @torch.no_grad()
    def merge(parts: list[Tensor]) -> Tensor:
        padding = parts[0].new_zeros(rows[2], *parts[0].shape[1:])
        return torch.cat([*parts, padding])

    return ShardedTensorFactory(
        projection.key,
        projection.data,
        build,
        merge,
        projection.replica_id,
        projection.flattened_range,
    )
