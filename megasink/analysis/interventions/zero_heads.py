"""Static masks: chosen heads give zero, or their mean, to the output projection (P4.7, P3.12).

Shapes: B rows, Q tokens, H query heads, D head dim.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megasink.analysis.capture.base import Listener, OpenProbe
from megasink.analysis.capture.changes import ForwardPass, HeadChange, HeadOutputs
from megasink.analysis.capture.head_names import head_problems
from megasink.analysis.capture.identity import weights_hash
from megasink.analysis.capture.inputs import Sample
from megasink.analysis.interventions.heads import Heads, heads_by_layer, normalized_heads
from megasink.analysis.interventions.record import Intervention
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


@dataclass(frozen=True)
class ZeroHeads(Intervention):
    """Replace what chosen heads hand to the output projection by zero, or by their mean.

    Zero equals zero columns of W_O for the head; the bias of W_O stays, and other heads are not
    rescaled. The paper does not say which of the two it means by ablation (P4.7).

    Attributes:
        heads: (layer, head) pairs, both from 0; sorted, each once.
        mean: a file of `MeanOutputs.save`, whose means replace the
            outputs; None for zero.
        mean_sha256: of that file; filled in, and compared if given.
        mask_shape: (layers, heads) of the mask that the heads were read from, which the model
            must have; None if they were listed.

    Raises:
        ValueError: negative or non-integer numbers, or a missing or different file of means.
    """

    kind: ClassVar[str] = "zero-heads"
    source: ClassVar[str] = "P4.7, P3.12"

    heads: Heads
    mean: str | None = None
    mean_sha256: str | None = None
    mask_shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", normalized_heads(self.heads))
        if self.mask_shape is not None:
            object.__setattr__(self, "mask_shape", tuple(self.mask_shape))
        if self.mean is None:
            if self.mean_sha256 is not None:
                raise ValueError("mean_sha256 without mean")
            return
        try:
            digest = hashlib.sha256(Path(self.mean).read_bytes()).hexdigest()
        except OSError as error:
            raise ValueError(f"mean {self.mean}: {error.strerror}") from error
        if self.mean_sha256 not in (None, digest):
            raise ValueError(f"mean {self.mean} is another file than before (its hash differs)")
        object.__setattr__(self, "mean_sha256", digest)

    def change(self) -> HeadChange:
        """Return the change.

        Raises:
            UserError: the file of means cannot be read.
        """
        means = None if self.mean is None else read_means(Path(self.mean))
        return _Zeroing(self.heads, means, self.mask_shape)


class _Zeroing(HeadChange):
    """See `ZeroHeads`."""

    def __init__(
        self,
        heads: Heads,
        means: MeanOutputs | None,
        mask_shape: tuple[int, int] | None,
    ):
        self._heads, self._means, self._shape = heads, means, mask_shape
        self._layers = heads_by_layer(heads)
        if means is not None:
            self.weights = means.weights
        self._masks: dict[int, Tensor] = {}

    def problems(self, heads: Sequence[int]) -> list[str]:
        problems = head_problems(self._heads, heads)
        shape = (len(heads), max(heads, default=0))
        if self._shape not in (None, shape):
            problems.append(
                f"the mask has {self._shape[0]} layers of {self._shape[1]} heads, the model "
                f"{shape[0]} of {shape[1]}"
            )
        if self._means is not None:
            problems += self._means.problems(heads)
        return problems

    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> Tensor | None:
        heads = self._layers.get(outputs.layer)
        if heads is None:
            return None
        out_BQHD = outputs.out_BQHD
        mask_H1 = self._masks.get(outputs.layer)
        if mask_H1 is None or mask_H1.device != out_BQHD.device:
            mask_H1 = torch.zeros(out_BQHD.shape[2], 1, dtype=torch.bool)
            mask_H1[heads] = True
            mask_H1 = self._masks[outputs.layer] = mask_H1.to(out_BQHD.device)
        if self._means is None:
            return out_BQHD.masked_fill(mask_H1, 0.0)
        return torch.where(mask_H1, self._means.by_layer[outputs.layer].to(out_BQHD), out_BQHD)
