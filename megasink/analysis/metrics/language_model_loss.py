"""The language-model loss of the samples, as sums over sums.

Shapes: N samples.
"""

import math

from torch import Tensor

from megasink.analysis.metrics.head_scores import score
from megasink.analysis.metrics.registry import metric


@metric(
    "nats_per_token",
    source="cross-entropy in nats, over all targets of all samples",
    unit="nats",
    axis="model",
    shown=("table", "scalar"),
    number="{:.4f}",
)
def nats_per_token(nats_N: Tensor, targets_N: Tensor) -> Tensor:
    """Mean loss over all targets."""
    return nats_N.sum() / targets_N.sum()


@metric("perplexity", source="P1.26", unit="1", axis="model", shown=("table",), number="{:.2f}")
def perplexity(nats_per_token: Tensor) -> Tensor:
    """exp of the mean loss in nats."""
    return nats_per_token.exp()


@metric(
    "bits_per_byte",
    source="P0.18",
    unit="bits",
    axis="model",
    shown=("table", "scalar"),
    number="{:.4f}",
)
def bits_per_byte(nats_of_bytes_N: Tensor, bytes_N: Tensor) -> Tensor:
    """Loss of the targets that stand for bytes, in bits, over their bytes."""
    return nats_of_bytes_N.sum() / math.log(2) / bytes_N.sum()


EQUATION = "arXiv 1905.10650, Eq. 2"


@score("gradient", source=EQUATION, unit="nats", shown=("table", "heatmap", "rank"))
def absolute(mask_gradient_H: Tensor) -> Tensor:
    """|derivative| of a text's mean loss by a factor of the head's output, at 1."""
    return mask_gradient_H.abs()


@score(
    "gradient_signed",
    source=f"{EQUATION}, without the absolute value",
    unit="nats",
    bounds=(-math.inf, math.inf),
    title="signed gradient",
)
def signed(mask_gradient_H: Tensor) -> Tensor:
    """First-order rise of the loss without the head: minus the derivative of `gradient`."""
    return -mask_gradient_H
