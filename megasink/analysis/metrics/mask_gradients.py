"""The gradient of a head's mask: how the loss changes with a factor of the head's output.

Michel, Levy and Neubig (2019), Eq. 2, with a text as the sample. Shapes: H heads.
"""

import math

from torch import Tensor

from megasink.analysis.metrics.head_scores import score

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
