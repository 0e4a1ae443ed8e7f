"""The t-SNE of P4.6 under ablation of single heads of a layer (P4.7)."""

from collections.abc import Sequence

import torch

from megasink.intervene.zero_heads import ZeroHeads
from megasink.probe.base import OpenProbe
from megasink.probe.geometry import Geometry, project, read_rows
from megasink.probe.inputs import Sample


def ablated_geometry(
    open_probe: OpenProbe,
    samples: Sequence[Sample],
    heads: Sequence[int],
    *,
    layer: int = 0,
    seed: int = 0,
    mean: str | None = None,
    device: torch.device | str = "cpu",
) -> dict[int | None, Geometry]:
    """Project the MLP activations of block 0 with each head of a layer ablated in turn.

    Heads of layers above 0 do not reach these activations.

    Args:
        heads: number of heads in each layer of the model.
        seed: of t-SNE.
        mean: file of mean outputs that replace a head's; None for zero.

    Returns:
        head -> what `megasink.probe.geometry.project` returns; None: nothing is ablated.

    Raises:
        ConfigError: the layer has no softmax attention, or the means do not fit.
    """
    found = {}
    for head in (None, *range(max(heads[layer], 1))):
        chosen = [] if head is None else [ZeroHeads(((layer, head),), mean=mean)]
        rows = read_rows(
            lambda observer, changes=(), chosen=chosen: open_probe(
                observer, [*changes, *(intervention.change() for intervention in chosen)]
            ),
            samples,
            device=device,
        )
        found[head] = project(rows, seed=seed)
    return found
