"""Compute the statistics of each sequence in one attention call.

Shapes: B rows, H query heads, G key/value groups, T tokens, D head dim, E hidden size, X 1 or D.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megasink.analysis.capture.segments import Segment, whole_rows
from megasink.analysis.metrics.attention_weights import (
    WeightStatistics,
    attention_maps,
    first_weights,
    proxy_maps,
    proxy_statistics,
    weight_statistics,
)
from megasink.attention import feature_map

_OF_WEIGHTS = {name.replace("_BHT", "_HT"): name for name in WeightStatistics._fields}

MAP = "map_HTS"
"""Attention weights of at most `MAP_TOKENS` tokens, for listeners. No metric uses them."""


@dataclass
class AttentionCall:
    """Inputs and outputs of one attention layer."""

    # Kernel inputs and output; the value's head dim may differ.
    query_BHTD: Tensor
    key_BGTD: Tensor
    value_BGTD: Tensor
    out_BHTD: Tensor
    # As in `weight_statistics`.
    scale: float
    window: int | None = None
    prefix: int = 0
    slot_logit_BHT: Tensor | None = None
    distance_bias_HT: Tensor | None = None
    softcap: float | None = None
    gated_out_BHTD: Tensor | None = None  # input of the output projection; None for `out_BHTD`
    explicit_gate_BHTX: Tensor | None = None
    # Whether the mean of the explicit gate is the head's importance; else the softmax gate's mean.
    gate_is_importance: bool = True
    output_weight_HDE: Tensor | None = None  # of the output projection, by query head
    # "softmax", or one of P2.30 to P2.36, with proxy weights (P2.37) and no prefix, slot or bias.
    similarity: str = "softmax"
    mlp: tuple[Tensor, Tensor] | None = None  # the two [D, D] weights of the similarity "mlp"
    out_scale: float = 1.0  # constant factor of `out_BHTD`, applied after attention
    slot_has_value: bool = False  # whether the slot adds a value, as a bias does and a sink not
    # Tokens run in earlier calls; a window may have dropped the keys of some.
    cached: int = 0

    @property
    def first_key(self) -> int:
        """Place of the first key, in tokens."""
        return self.cached + self.query_BHTD.shape[2] - self.key_BGTD.shape[2]

    def new(self, start: int, stop: int) -> slice:
        """Return the queries of a sequence."""
        return slice(max(start - self.cached, 0), stop - self.cached)


@torch.no_grad()
def attention_statistics(
    call: AttentionCall, segments: list[Segment], needs: Set[str]
) -> Iterator[dict[str, Tensor]]:
    """Yield each segment's needed statistics that apply; after a cache those of weights alone."""
    shape = (call.query_BHTD.shape[0], call.query_BHTD.shape[2])
    of_weights = needs & _OF_WEIGHTS.keys()
    of_batch = None
    if of_weights and whole_rows(segments, shape):
        of_batch = _weights(call, slice(None), (0, shape[1]), of_weights)
    tensors = {
        "query_HTD": call.query_BHTD,
        "key_GTD": call.key_BGTD,
        "value_GTD": call.value_BGTD,
        "out_HTD": call.out_BHTD,
        "gated_out_HTD": call.out_BHTD if call.gated_out_BHTD is None else call.gated_out_BHTD,
    }
    if call.explicit_gate_BHTX is not None:
        tensors["explicit_gate_HTX"] = call.explicit_gate_BHTX
    for row, start, stop in segments:
        cut = slice(start, stop)
        statistics = {name: tensor[row, :, cut] for name, tensor in tensors.items()}
        if call.output_weight_HDE is not None:
            statistics["output_weight_HDE"] = call.output_weight_HDE
        if of_weights:
            weights, index = of_batch, row
            if weights is None:
                weights = _weights(call, slice(row, row + 1), (start, stop), of_weights)
                index = 0
            statistics |= {name: by_row[index] for name, by_row in weights.items()}
        if MAP in needs:
            query, key, slot, options = _arguments(call, row, (start, stop))
            if call.similarity == "softmax":
                statistics[MAP] = attention_maps(query, key, slot_logit_HT=slot, **options)
            else:
                statistics[MAP] = proxy_maps(query, key, **options)
        if call.explicit_gate_BHTX is not None and call.gate_is_importance:
            statistics["gate_HT"] = call.explicit_gate_BHTX[row, :, cut].float().mean(-1)
        yield {name: at_least_float32(value) for name, value in statistics.items() if name in needs}


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return float32 and float64 unchanged, and half precision as float32."""
    return tensor if tensor.itemsize >= 4 else tensor.float()


def _weights(
    call: AttentionCall, rows: slice, place: tuple[int, int], names: set[str]
) -> dict[str, Tensor]:
    """Return at least the named statistics, [B, H, T] each."""
    query, key, slot, options = _arguments(call, rows, place)
    if call.similarity != "softmax":
        statistics = proxy_statistics(query, key, **options)
    elif names == {"first_weight_HT"}:
        first_BHT = first_weights(query, key, slot_logit_BHT=slot, **options)
        # The cache of a window may have dropped the first key.
        return {"first_weight_HT": first_BHT * (place[0] >= call.first_key)}
    else:
        statistics = weight_statistics(query, key, slot_logit_BHT=slot, **options)
    return {ours: getattr(statistics, name) for ours, name in _OF_WEIGHTS.items()}


def _arguments(
    call: AttentionCall, rows: slice | int, place: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """Return queries, keys, slot logits and options for some rows of a batch, or for one row."""
    cut = call.new(*place)
    start, stop = (max(at - call.first_key, 0) for at in place)
    query, key = call.query_BHTD[rows, :, cut], call.key_BGTD[rows, :, start:stop]
    options: dict[str, Any] = {"scale": call.scale, "window": call.window}
    if call.similarity != "softmax":
        query, key = (feature_map(x, call.similarity, call.mlp) for x in (query, key))
        return query, key, None, options | {"similarity": call.similarity}
    slot = call.slot_logit_BHT
    if slot is not None:
        slot = slot.expand(call.query_BHTD.shape[:3])[rows, :, cut]
    options["prefix"], options["softcap"] = call.prefix, call.softcap
    return query, key, slot, options | {"distance_bias_HT": call.distance_bias_HT}
