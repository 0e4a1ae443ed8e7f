"""The P0-sink circuit of P4: where the sink becomes prominent, its center, and its stage.

The paper reads all three from plots; the rules here are megasink's.

Shapes: L layers, H heads, K leading token positions, P token positions, S states.
"""

import math

import torch
from torch import Tensor

from megasink.analysis.metrics import (
    residual_stream,  # noqa: F401  # registers the metrics used here
    sinks,  # noqa: F401  # registers the metrics used here
)
from megasink.analysis.metrics.registry import metric

NORM_RATIO = 5.0
ATTENTION = 0.3
SINK = 0.05
EARLY = 1 / 3

STAGES = ("none", "broad", "shifted", "forming", "middle", "fixed")
"""Stages, in the order in which `circuit_stage` checks them."""


@metric(
    "prominent_after_block",
    source="P4.15",
    unit="block",
    axis="model",
    title="block after which the first token is prominent",
    number="{:.0f}",
)
def prominent_after_block(massive_ratio_S: Tensor, first_token_attention_L: Tensor) -> Tensor:
    """First block whose output has norm(x_0) > 5 mean norm(x_i), read with weight > 0.3 on token 0.

    The reader is the next layer with attention. NaN if there is none.
    """
    for block, ratio in enumerate(massive_ratio_S[2::2]):
        readers = first_token_attention_L[block + 1 :]
        readers = readers[~readers.isnan()]
        if ratio > NORM_RATIO and len(readers) and readers[0] > ATTENTION:
            return torch.tensor(float(block))
    return torch.tensor(math.nan)


@metric(
    "sink_centre",
    source="P4.24",
    unit="token",
    axis="model",
    shown=("table", "scalar"),
    title="sink center",
    number="{:.0f}",
)
def sink_centre(alpha_LHK: Tensor) -> Tensor:
    """Position of the highest mean alpha_k over layers and heads."""
    return _highest(alpha_LHK.flatten(0, 1))


@metric(
    "sink_centre_by_direction",
    source="P4.24, P4.5",
    unit="token",
    axis="model",
    title="sink center by direction",
    number="{:.0f}",
)
def sink_centre_by_direction(alpha_LHK: Tensor, cosine_SP: Tensor) -> Tensor:
    """Position whose states are most aligned across inputs, by the mean cosine over states."""
    # Without the embedding, where a BOS always matches itself.
    return _highest(cosine_SP[1:, : alpha_LHK.shape[2]])


def _highest(rows_RK: Tensor) -> Tensor:
    """Return the column with the highest mean, ignoring NaN; NaN if all entries are NaN."""
    if bool(rows_RK.isnan().all()):
        return torch.tensor(math.nan)
    return rows_RK.nanmean(0).nan_to_num(nan=-math.inf).argmax().double()


@metric(
    "circuit_stage",
    source="P4.23",
    unit="stage",
    axis="model",
    shown=("table", "scalar"),
    title="circuit stage",
    levels=STAGES,
)
def circuit_stage(
    sink_rate_K: Tensor, prominent_after_block: Tensor, first_token_attention_L: Tensor
) -> Tensor:
    """How far the sink has formed: none, broad, shifted, forming, middle (prominent late) or fixed.

    "none": no position's sink rate reaches `SINK`; "broad": the second highest rate is more than
    half of the highest; "shifted": the center is not the first token; "forming": it is, without a
    massive norm; "middle" and "fixed": prominent after and within the first third of the blocks.
    """
    rates_K = sink_rate_K.nan_to_num()  # NaN: positions that no sequence reached
    highest, *others = rates_K.sort(descending=True).values
    if not highest >= SINK:
        stage = "none"
    elif others and others[0] > highest / 2:
        stage = "broad"
    elif int(rates_K.argmax()) != 0:
        stage = "shifted"
    elif bool(prominent_after_block.isnan()):
        stage = "forming"
    else:
        early = prominent_after_block < EARLY * len(first_token_attention_L)
        stage = "fixed" if early else "middle"
    return torch.tensor(float(STAGES.index(stage)))
