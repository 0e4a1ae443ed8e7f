"""Mean outputs of heads over a calibration set, for mean ablation (P4.7).

Shapes: B rows, Q tokens, H query heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megasink.analysis.capture.base import Listener, OpenProbe
from megasink.analysis.capture.changes import ForwardPass, HeadChange, HeadOutputs
from megasink.analysis.capture.identity import weights_hash
from megasink.analysis.capture.inputs import Sample
from megasink.atomic import atomic_file
from megasink.errors import UserError


@dataclass(frozen=True)
class MeanOutputs:
    """What each head hands to the output projection, on average over all tokens.

    Attributes:
        by_layer: layer -> [H, D], float32.
        weights: hash of the weights of the model (`weights_hash`).
        tokens: number of tokens in the average.
    """

    by_layer: dict[int, Tensor]
    weights: str
    tokens: int

    def problems(self, heads: Sequence[int]) -> list[str]:
        """Return why the means do not fit a model with so many heads in each layer."""
        own = {layer: len(mean_HD) for layer, mean_HD in self.by_layer.items()}
        wanted = {layer: count for layer, count in enumerate(heads) if count}
        return [] if own == wanted else [f"the means are of heads {own}, the model has {wanted}"]

    def save(self, path: Path) -> None:
        """Write a safetensors file atomically."""
        tensors = {str(layer): mean.contiguous().cpu() for layer, mean in self.by_layer.items()}
        with atomic_file(path) as file:
            file.write(save(tensors, {"weights": self.weights, "tokens": str(self.tokens)}))


def read_means(path: Path) -> MeanOutputs:
    """Read a file of `MeanOutputs.save`.

    Raises:
        UserError: the file is missing or something else.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            by_layer = {int(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return MeanOutputs(by_layer, metadata["weights"], int(metadata["tokens"]))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{path} is no file of mean outputs: {error}") from error


class _Summing(HeadChange):
    """Sums the outputs of the heads, and changes nothing."""

    reads_segments = True

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}
        self.tokens = 0

    def begin(self, forward: ForwardPass) -> None:
        self.tokens += sum(segment.stop - segment.start for segment in forward.segments)

    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> None:
        for row, start, stop in forward.segments:
            total_HD = outputs.out_BQHD[row, start:stop].sum(0, dtype=torch.float64)
            if outputs.layer in self.sums:
                total_HD = total_HD + self.sums[outputs.layer]
            self.sums[outputs.layer] = total_HD


@torch.no_grad()
def mean_outputs(
    open_probe: OpenProbe, samples: Sequence[Sample], *, device: torch.device | str = "cpu"
) -> MeanOutputs:
    """Run samples one by one, and average what each head hands to its output projection.

    Every token of every sample counts once, whatever its position.
    """
    summing = _Summing()
    with open_probe(Listener(), [summing]) as probe:
        for sample in samples:
            probe.forward(torch.tensor([sample.tokens], device=device), logits=False)
        weights = weights_hash(probe.model)
    by_layer = {layer: (total / summing.tokens).float() for layer, total in summing.sums.items()}
    return MeanOutputs(by_layer, weights, summing.tokens)
