"""The P0-sink circuit of P4: where the sink becomes prominent, where its centre is, and its stage.

The paper reads all three from plots. The rules here are operational; draw the raw curves beside
them.

Shapes: L layers, K first token positions.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megasink.diagnostics import sinks, states  # noqa: F401  # whose metrics are read here
from megasink.diagnostics.registry import metric

Floats = NDArray[np.float64]

NORM_RATIO = 5.0
ATTENTION = 0.3
SINK = 0.05
EARLY = 1 / 3

STAGES = ("none", "broad", "shifted", "forming", "middle", "fixed")
"""In the order of the tests in `circuit_stage`."""


def prominent_layer(massive_ratio_L: Floats, first_attention_L: Floats) -> int | None:
    """The block, counted from 0, after whose output the sink is prominent (P4.15).

    The first block l whose output has norm(first token) > `NORM_RATIO` * mean norm of the others
    and is read by a layer (l + 1 or the next one with attention) that gives the first token more
    than `ATTENTION` of its weight.

    Args:
        massive_ratio_L: of the outputs of blocks 0 to L - 1 (P2.10).
        first_attention_L: mean weight on the first token by layer (P1.31); NaN without attention.

    Returns:
        the block, or None where no block is.
    """
    for block in range(len(massive_ratio_L)):
        readers = first_attention_L[block + 1 :]
        readers = readers[~np.isnan(readers)]
        if massive_ratio_L[block] > NORM_RATIO and len(readers) and readers[0] > ATTENTION:
            return block
    return None


class SinkCentre(NamedTuple):
    """Where the sink sits (P4.24), by two measures that need not agree.

    Attributes:
        by_attention: the position of the highest mean alpha_k over layers and heads.
        by_direction: the position whose states point the same way in every input most, by the mean
            over states of the cosine across inputs (P4.5); None where fewer than two samples ran.
    """

    by_attention: int
    by_direction: int | None


def sink_centre(alpha_LHK: Floats, cosine_SP: Floats | None) -> SinkCentre:
    """The centre of the sink among the first positions.

    Args:
        alpha_LHK: mean alpha_k over samples; NaN for missing layers and heads.
        cosine_SP: cosine across inputs by state and position, None if not measured.
    """
    by_attention = _highest(alpha_LHK.reshape(-1, alpha_LHK.shape[2]))
    by_direction = None
    if cosine_SP is not None:
        # Without the embedding, where a BOS always agrees with itself.
        first = cosine_SP[1:, : alpha_LHK.shape[2]]
        if not np.isnan(first).all():
            by_direction = _highest(first)
    return SinkCentre(by_attention, by_direction)


def _highest(rows_RK: Floats) -> int:
    """The column of the highest mean; columns and rows may hold NaN."""
    count_K = (~np.isnan(rows_RK)).sum(0)
    mean_K = np.nansum(rows_RK, axis=0) / np.maximum(count_K, 1)
    return int(np.where(count_K > 0, mean_K, -np.inf).argmax())


def circuit_stage(sink_rate_K: Floats, prominent: int | None, layers: int) -> str:
    """The stage of the circuit in training (P4.23), as a signal of convergence.

    - "none": no position's sink rate reaches `SINK`;
    - "broad": the second highest rate is more than half of the highest: several first tokens;
    - "shifted": one centre, which is not the first token;
    - "forming": the first token, without a massive norm yet;
    - "middle": prominent only after the first third of the blocks;
    - "fixed": prominent within the first third.

    Args:
        sink_rate_K: Sink^eps_k of the first positions (P2.2).
        prominent: of `prominent_layer`.
        layers: L.
    """
    sink_rate_K = np.nan_to_num(sink_rate_K)  # positions that no sequence reached
    ordered = np.sort(sink_rate_K)[::-1]
    if not ordered[0] >= SINK:
        return "none"
    if len(ordered) > 1 and ordered[1] > ordered[0] / 2:
        return "broad"
    if int(sink_rate_K.argmax()) != 0:
        return "shifted"
    if prominent is None:
        return "forming"
    return "fixed" if prominent < EARLY * layers else "middle"


@metric(
    "prominent_after_block",
    source="P4.15",
    unit="block",
    axis="model",
    number="{:.0f}",
)
def prominent_after_block(massive_ratio_S: Tensor, first_token_attention_L: Tensor) -> Tensor:
    """First block whose output has norm(x_0) > 5 times the others' and is read by over 0.3."""
    block = prominent_layer(massive_ratio_S[2::2].numpy(), first_token_attention_L.numpy())
    return torch.tensor(math.nan if block is None else float(block))


@metric(
    "sink_centre",
    source="P4.24",
    unit="token",
    axis="model",
    shown=("table", "scalar"),
    title="centre of the sink",
    number="{:.0f}",
)
def sink_centre_by_attention(alpha_LHK: Tensor) -> Tensor:
    """The position of the highest mean alpha_k over layers and heads."""
    return torch.tensor(float(sink_centre(alpha_LHK.numpy(), None).by_attention))


@metric(
    "sink_centre_by_direction", source="P4.24, P4.5", unit="token", axis="model", number="{:.0f}"
)
def sink_centre_by_direction(alpha_LHK: Tensor, cosine_SP: Tensor) -> Tensor:
    """The position whose states point the same way in every input most."""
    position = sink_centre(alpha_LHK.numpy(), cosine_SP.numpy()).by_direction
    return torch.tensor(math.nan if position is None else float(position))


@metric(
    "circuit_stage",
    source="P4.23",
    unit="stage",
    axis="model",
    shown=("table", "scalar"),
    title="stage of the circuit",
    levels=STAGES,
)
def stage(
    sink_rate_K: Tensor, prominent_after_block: Tensor, first_token_attention_L: Tensor
) -> Tensor:
    """Stage of the P0-sink circuit: none, broad, shifted, forming, middle or fixed."""
    block = float(prominent_after_block)
    prominent = None if math.isnan(block) else int(block)
    name = circuit_stage(sink_rate_K.numpy(), prominent, len(first_token_attention_L))
    return torch.tensor(float(STAGES.index(name)))
