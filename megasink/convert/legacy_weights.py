"""Weights of Megatron's legacy format under the keys and in the shapes of torch_dist checkpoints.

The file of a rank numbers layers from the first of its stage and experts from its own first, and
holds a share of the rows or columns of tensor-parallel layers.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
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

# The axis that tensor parallelism shards; everything else is whole on every rank.
_CUT_ROWS = ("linear_qkv", "linear_fc1", "linear_gate", "word_embeddings", "output_layer")
_CUT_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)")
_DENSE_FFN = f"{LAYERS}mlp.linear_fc1."
_BALANCE_STATE = ".head_counter."


@dataclass(frozen=True)
class _Piece:
    """A tensor of a rank: its key, layer and expert, and offsets in a weight of `shape`."""

    key: str
    index: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: StoredTensor

    def find(self) -> StoredTensor:
        return self.tensor


def legacy_weights(folder: Path) -> dict[str, Weight]:
    """Return {key: weight} for all weights in a folder iter_NNNNNNN.

    Raises:
        UserError: the checkpoint is incomplete, corrupt, untrusted, or of an unsupported layout.
    """
    ranks = read_ranks(folder)
    arguments = next(iter(ranks.values())).arguments
    _refuse(folder, arguments)
    found: dict[str, list[_Piece]] = {}
    for piece in _pieces(ranks, arguments):
        found.setdefault(piece.key, []).append(piece)
    return {key: _weight(pieces) for key, pieces in found.items()}


def _tensor_ranks(arguments: dict[str, Any]) -> tuple[int, int]:
    """Return the tensor-parallel sizes of the model and of its experts."""
    tp = int(arguments.get("tensor_model_parallel_size") or 1)
    return tp, int(arguments.get("expert_tensor_parallel_size") or tp)


def _refuse(folder: Path, arguments: dict[str, Any]) -> None:
    """Refuse layouts whose pieces cannot be told apart here."""
    (tp, etp), groups = _tensor_ranks(arguments), _groups(arguments)
    why = None
    if groups < tp:
        why = f"{groups} key/value groups over TP={tp}, which ranks share"
    elif arguments.get("num_experts") and etp not in (1, tp):
        why = f"--expert-tensor-parallel-size {etp} with TP={tp}"
    elif arguments.get("attention_variant_layers"):
        why = "layers that differ (--attention-variant-layers)"
    if why:
        raise UserError(
            f"{folder} has Megatron's legacy format with {why}: load it with Megatron and save it "
            "with --ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        )


def _pieces(ranks: Ranks, arguments: dict[str, Any]) -> Iterator[_Piece]:
    """Yield every part of every weight once."""
    tp, etp = _tensor_ranks(arguments)
    ep = int(arguments.get("expert_model_parallel_size") or 1)
    local_experts = int(arguments.get("num_experts") or 0) // ep
    first_layers = _first_layers(ranks)
    tied = not arguments.get("untie_embeddings_and_output_weights")
    width = int(arguments.get("ffn_hidden_size") or 0)
    seen = set()
    for (tensor_rank, stage, expert_rank), file in sorted(ranks.items()):
        for chunk, tensors in enumerate(file.chunks):
            for name, tensor in tensors.items():
                if _BALANCE_STATE in name or (tied and name.startswith("output_layer.")):
                    continue
                key, index, expert = _key(name, first_layers[stage, chunk])
                share = (tensor_rank, tp)
                if expert is not None:
                    index = (*index, expert_rank * local_experts + expert)
                    share = share if etp > 1 else (0, 1)
                for part, rows in _split_gate(key, tensor, arguments, tp):
                    plain = part.startswith(_DENSE_FFN) and rows.shape[0] * share[1] == width
                    halved = ".linear_fc1." in part and not plain and share[1] > 1
                    for piece in _placed(part, index, rows, *share, halved=halved):
                        place = (part, index, piece.offsets)
                        if place not in seen:  # otherwise a copy on another rank
                            seen.add(place)
                            yield piece


def _first_layers(ranks: Ranks) -> dict[tuple[int, int], int]:
    """Return {(stage, chunk): index in the model of its first layer}."""
    files = {stage: file for (_, stage, _), file in sorted(ranks.items(), reverse=True)}
    found, first = {}, 0
    for chunk in range(max(len(file.chunks) for file in files.values())):
        for stage in sorted(files):
            found[stage, chunk] = first
            numbers = (_LAYER.fullmatch(name) for name in files[stage].chunks[chunk])
            first += 1 + max((int(n[1]) for n in numbers if n), default=-1)
    return found


def _key(name: str, first_layer: int) -> tuple[str, tuple[int, ...], int | None]:
    """Return the key, the layer if any, and the number of the expert on its rank if any."""
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
    """Split the gate rows, which have their own key, from a rank's linear_qkv; drop the padding."""
    if ".linear_qkv." not in key or "layer_norm_" in key:
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
    if "layer_norm_" in key:
        return None
    if key.endswith("softmax_offset") or any(name in key for name in _CUT_ROWS):
        return 0
    return 1 if key.endswith(_CUT_COLUMNS) else None


def _placed(
    key: str, index: tuple[int, ...], tensor: StoredTensor, rank: int, ranks: int, *, halved: bool
) -> Iterator[_Piece]:
    """Yield the share of one of `ranks` ranks: one piece, or if halved its gate and up rows."""
    axis, shape = _cut_axis(key), list(tensor.shape)
    if axis is None:
        yield _Piece(key, index, (0,) * len(shape), tensor.shape, tensor)
        return
    shape[axis] *= ranks
    pieces = [(tensor, rank * tensor.shape[axis])]
    if halved:
        half = tensor.shape[0] // 2
        pieces = [
            (tensor.rows(0, half), rank * half),
            (tensor.rows(half, half), shape[0] // 2 + rank * half),
        ]
    for part, start in pieces:
        offsets = tuple(start if a == axis else 0 for a in range(len(shape)))
        yield _Piece(key, index, offsets, tuple(shape), part)


def _weight(pieces: list[_Piece]) -> Weight:
    """Assemble a weight, with the axes of layers and experts before its own."""
    first = pieces[0]
    leading = tuple(1 + max(p.index[n] for p in pieces) for n in range(len(first.index)))
    parts = [
        Part((*p.index, *p.offsets), (*(1 for _ in p.index), *p.tensor.shape), p.find)
        for p in pieces
    ]
    return Weight((*leading, *first.shape), first.tensor.dtype, parts)
