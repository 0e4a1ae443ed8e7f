"""The table that maps Megatron weights to Hugging Face weights, row by row.

One row serves both directions. In names, ``{layer}`` runs over the layers and ``{expert}`` over the
experts; Megatron's checkpoints hold these as leading axes of one tensor.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megasink.checkpoints.layer_keys import LAYERS, NORMS
from megasink.convert.transforms import Transform
from megasink.errors import UserError, listed

if TYPE_CHECKING:
    from torch import Tensor

NORM_BEFORE_EXPERTS, NORM_OF_LOCAL_SPEC = LAYERS + NORMS[0], LAYERS + NORMS[1]
EXPERTS = ".experts.experts."


@dataclass(frozen=True)
class Row:
    """Tensors of Megatron that correspond to tensors of Hugging Face."""

    # Keys in a torch_dist checkpoint; after "decoder.layers." comes a number where layers differ.
    megatron: tuple[str, ...]
    hf: tuple[str, ...]  # names in the safetensors files
    transform: Transform = field(default_factory=Transform)


def numbered(key: str, layer: int) -> str:
    """Return a key of all layers as the key of one, in a checkpoint whose layers differ."""
    return f"{LAYERS}{layer}.{key.removeprefix(LAYERS)}"


def row(megatron: str, *hf: str, transform: Transform | None = None) -> Row:
    """Return a row with a single Megatron key."""
    return Row((megatron,), hf, transform or Transform())


@dataclass(frozen=True)
class Step:
    """A row applied to one layer and expert."""

    row: Row
    index: tuple[int, ...]  # leading indices of Megatron's tensors: layer, expert
    hf: tuple[str, ...]  # the names with the numbers filled in
    expert: int | None = None  # to read of tensors that hold all experts; None to read all

    def of_experts(self, experts: int) -> "list[Step]":
        """Return a step for each expert if the row's tensors hold all of them, to save memory."""
        stacked = len(self.index) == 1 and "{expert}" not in self.row.hf[0]
        stacked = stacked and all(EXPERTS in key for key in self.row.megatron)
        if not (stacked and self.row.megatron):
            return [self]
        return [replace(self, index=(*self.index, n), expert=n) for n in range(experts)]


def steps(table: Sequence[Row], layers: int, experts: int) -> Iterator[Step]:
    """Yield all steps, layer by layer, as tensors are written; a dense model has 0 experts."""
    for per_layer, group in itertools.groupby(table, key=lambda row: "{layer}" in row.hf[0]):
        rows = tuple(group)
        for layer in range(layers) if per_layer else (None,):
            for row in rows:
                for expert in range(experts) if "{expert}" in row.hf[0] else (None,):
                    index = tuple(number for number in (layer, expert) if number is not None)
                    names = tuple(name.format(layer=layer, expert=expert) for name in row.hf)
                    yield Step(row, index, names)


def planned(step: Step, tensors: "Sequence[Tensor]") -> "list[tuple[str, Tensor]]":
    """Return (name, meta tensor) of a step's output, given meta tensors of Megatron's shapes."""
    try:
        made = step.row.transform.to_hf(*tensors)
    except RuntimeError as error:
        shapes = ", ".join(str(list(t.shape)) for t in tensors)
        raise UserError(
            f"{' and '.join(step.row.megatron)} {shapes} cannot become {step.hf[0]}: {error}"
        ) from error
    return [(name, t.to("meta")) for name, t in zip(step.hf, made, strict=True)]


def refuse(what: str, problems: Sequence[str]) -> None:
    """Raise a UserError with the first three problems, if there are any."""
    if problems:
        raise UserError(f"{what}: {listed(problems, 3)}")
