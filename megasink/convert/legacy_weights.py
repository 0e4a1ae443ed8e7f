"""Weights of Megatron's old format under the keys and in the shapes of torch_dist checkpoints.

A rank's file names modules: layers count from its stage's first, experts from its own first, and
tensor-parallel layers hold a share of the rows or columns.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megasink.checkpoint.legacy import RankFile, read_ranks
from megasink.checkpoint.stored_tensor import StoredTensor
from megasink.convert.stored_weights import Part, Weight
from megasink.convert.table import LAYERS
from megasink.errors import UserError
from megasink.gate_options import is_megatrons_output_gate, trailing_rows

Ranks = dict[tuple[int, int, int], RankFile]

# Which axis tensor parallelism cuts; what is not here is whole on every rank.
_CUT_ROWS = ("linear_qkv", "linear_fc1", "linear_gate", "word_embeddings", "output_layer")
_CUT_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)")
_BALANCE_STATE = ".head_counter."


@dataclass(frozen=True)
class _Piece:
    """A tensor of a rank, and where it goes: `index` by layer and expert, `rank` of `ranks`."""

    key: str
    index: tuple[int, ...]
    rank: int
    ranks: int
    tensor: StoredTensor


def legacy_weights(folder: Path) -> dict[str, Weight]:
    """{key: weight} of every weight in a folder iter_NNNNNNN.

    Raises:
        UserError: it is not whole, broken, not to be trusted, or of a layout that is not known.
    """
    ranks = read_ranks(folder)
    arguments = next(iter(ranks.values())).arguments
    _refuse(folder, arguments)
    found: dict[str, list[_Piece]] = {}
    for piece in _pieces(ranks, arguments):
        found.setdefault(piece.key, []).append(piece)
    return {key: _weight(pieces, _glu(key)) for key, pieces in found.items()}


def _refuse(folder: Path, arguments: dict[str, Any]) -> None:
    """Layouts whose pieces are not told apart here."""
    tp = int(arguments.get("tensor_model_parallel_size") or 1)
    etp = int(arguments.get("expert_tensor_parallel_size") or tp)
    groups = _groups(arguments)
    why = None
    if groups < tp:
        why = f"{groups} key/value groups over TP={tp}, where ranks share them"
    elif arguments.get("num_experts") and etp not in (1, tp):
        why = f"--expert-tensor-parallel-size {etp} with TP={tp}"
    if why:
        raise UserError(
            f"{folder} is in Megatron's old format with {why}: load it with Megatron and save it "
            "with --ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        )


def _pieces(ranks: Ranks, arguments: dict[str, Any]) -> Iterator[_Piece]:
    """Every part of every weight, once."""
    tp = int(arguments.get("tensor_model_parallel_size") or 1)
    ep = int(arguments.get("expert_model_parallel_size") or 1)
    etp = int(arguments.get("expert_tensor_parallel_size") or tp)
    local_experts = int(arguments.get("num_experts") or 0) // ep
    first_layers = _first_layers(ranks)
    tied = not arguments.get("untie_embeddings_and_output_weights")
    seen = set()
    for (tensor_rank, stage, expert_rank), file in sorted(ranks.items()):
        for chunk, tensors in enumerate(file.chunks):
            for name, tensor in tensors.items():
                if _BALANCE_STATE in name or (tied and name.startswith("output_layer.")):
                    continue
                key, index, expert = _key(name, first_layers[stage, chunk])
                rank, count = tensor_rank, tp
                if expert is not None:
                    index = (*index, expert_rank * local_experts + expert)
                    rank, count = (tensor_rank, tp) if etp > 1 else (0, 1)
                for part, rows in _split_gate(key, tensor, arguments, tp):
                    share = (rank, count) if _cut_axis(part) is not None else (0, 1)
                    if (part, index, *share) in seen:
                        continue  # another rank's copy
                    seen.add((part, index, *share))
                    yield _Piece(part, index, *share, rows)


def _first_layers(ranks: Ranks) -> dict[tuple[int, int], int]:
    """{(stage, chunk): the model's number of its first layer}."""
    files = {stage: file for (_, stage, _), file in sorted(ranks.items(), reverse=True)}
    found, first = {}, 0
    for chunk in range(max(len(file.chunks) for file in files.values())):
        for stage in sorted(files):
            found[stage, chunk] = first
            numbers = (_LAYER.fullmatch(name) for name in files[stage].chunks[chunk])
            first += 1 + max((int(n[1]) for n in numbers if n), default=-1)
    return found


def _key(name: str, first_layer: int) -> tuple[str, tuple[int, ...], int | None]:
    """The key, the layer, and the rank's number of the expert."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name, (), None
    rest, index = layer[2], (first_layer + int(layer[1]),)
    rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    expert = None
    if found := _EXPERT.fullmatch(rest):
        expert, rest = int(found[1]), f"mlp.experts.experts.{found[2]}"
    elif found := _GROUPED_EXPERT.fullmatch(rest):
        expert, rest = int(found[2]), f"mlp.experts.experts.{found[1]}"
    return LAYERS + rest, index, expert


def _split_gate(
    key: str, tensor: StoredTensor, arguments: dict[str, Any], tp: int
) -> Iterator[tuple[str, StoredTensor]]:
    """The gate rows of a rank's linear_qkv have a key of their own; padding may follow them."""
    if ".linear_qkv." not in key or key.endswith("layer_norm_weight"):
        yield key, tensor
        return
    heads, groups = int(arguments["num_attention_heads"]), _groups(arguments)
    options = SimpleNamespace(**{**arguments, "num_query_groups": groups})
    grouped_gate = heads if is_megatrons_output_gate(options) else 0
    mixed = (heads + grouped_gate + 2 * groups) * int(arguments["kv_channels"]) // tp
    if tensor.shape[0] == mixed:
        yield key, tensor
        return
    yield key, tensor.rows(0, mixed)
    yield key.replace("linear_qkv", "linear_gate"), tensor.rows(mixed, trailing_rows(options) // tp)


def _groups(arguments: dict[str, Any]) -> int:
    grouped = arguments.get("group_query_attention")
    return int(arguments["num_query_groups" if grouped else "num_attention_heads"])


def _cut_axis(key: str) -> int | None:
    if key.endswith("layer_norm_weight"):
        return None
    if key.endswith("softmax_offset") or any(name in key for name in _CUT_ROWS):
        return 0
    return 1 if key.endswith(_CUT_COLUMNS) else None


def _glu(key: str) -> bool:
    """Whether a rank's rows are [its gate rows; its up rows]."""
    return ".linear_fc1." in key and _cut_axis(key) == 0


def _weight(pieces: list[_Piece], glu: bool) -> Weight:
    """A weight from its pieces, with the axes of layers and experts before its own."""
    first = pieces[0]
    axis = _cut_axis(first.key)
    shape = list(first.tensor.shape)
    if axis is not None:
        shape[axis] *= first.ranks
    leading = tuple(1 + max(p.index[n] for p in pieces) for n in range(len(first.index)))
    parts = []
    for piece in pieces:
        ones = (1,) * len(piece.index)
        for tensor, start in _halves(piece, shape[0]) if glu else [(piece.tensor, None)]:
            offsets = [0] * len(shape)
            if axis is not None:
                offsets[axis] = piece.rank * tensor.shape[axis] if start is None else start
            where = (*piece.index, *offsets)
            parts.append(Part(where, (*ones, *tensor.shape), partial(_itself, tensor)))
    return Weight((*leading, *shape), first.tensor.dtype, parts)


def _halves(piece: _Piece, rows: int) -> list[tuple[StoredTensor, int | None]]:
    """A rank's gate rows and up rows, and where they begin among all rows."""
    if piece.ranks == 1:
        return [(piece.tensor, 0)]
    half = piece.tensor.shape[0] // 2
    begin = piece.rank * half
    return [
        (piece.tensor.rows(0, half), begin),
        (piece.tensor.rows(half, half), rows // 2 + begin),
    ]


def _itself(tensor: StoredTensor) -> StoredTensor:
    return tensor
