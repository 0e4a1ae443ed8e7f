"""The table: which weights of Megatron are which weights of Hugging Face, row by row.

One row serves both directions. In names, ``{layer}`` runs over the layers and ``{expert}`` over the
experts; Megatron's checkpoints hold those as leading axes of one tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megasink.convert.transforms import Same, Transform
from megasink.errors import UserError

LAYERS = "decoder.layers."
# The norm before the experts: TransformerEngine's spec stores it under the first name, Megatron's
# own under the second, which is that of a dense layer's.
NORM_BEFORE_EXPERTS = f"{LAYERS}pre_mlp_layernorm.weight"
NORM_OF_LOCAL_SPEC = f"{LAYERS}mlp.linear_fc1.layer_norm_weight"


@dataclass(frozen=True)
class Row:
    """Some tensors of Megatron that are some tensors of Hugging Face.

    Attributes:
        megatron: keys in a torch_dist checkpoint; those of layers start with "decoder.layers.".
        hf: names in the safetensors files.
        transform: between them.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    transform: Transform = field(default_factory=Same)

    @property
    def per_layer(self) -> bool:
        """Whether the names run over the layers."""
        return "{layer}" in self.hf[0]

    @property
    def per_expert(self) -> bool:
        """Whether the names run over the experts."""
        return "{expert}" in self.hf[0]


def row(megatron: str, *hf: str, transform: Transform | None = None) -> Row:
    """A row with one key of Megatron; a key of a layer without its "decoder.layers."."""
    return Row((megatron,), hf, transform or Same())


@dataclass(frozen=True)
class Step:
    """One application of a row: to one layer, one expert.

    Attributes:
        row: whose.
        index: leading indices of Megatron's tensors: (), (layer,) or (layer, expert).
        hf: the names, written out.
    """

    row: Row
    index: tuple[int, ...]
    hf: tuple[str, ...]


def steps(table: Sequence[Row], layers: int, experts: int) -> Iterator[Step]:
    """Everything to do, layer by layer: the order in which it is written.

    Args:
        table: rows of layers together, between the others.
        layers, experts: of the model; 0 experts for a dense one.
    """
    of_layers = [place for place, r in enumerate(table) if r.per_layer]
    first, end = min(of_layers), max(of_layers) + 1
    for r in table[:first]:
        yield Step(r, (), r.hf)
    for layer in range(layers):
        for r in table[first:end]:
            if not r.per_expert:
                yield Step(r, (layer,), tuple(n.format(layer=layer) for n in r.hf))
                continue
            for expert in range(experts):
                names = tuple(n.format(layer=layer, expert=expert) for n in r.hf)
                yield Step(r, (layer, expert), names)
    for r in table[end:]:
        yield Step(r, (), r.hf)


def planned(step: Step, tensors: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """(name, empty tensor of its shape) of what a step will write, from such ones of Megatron.

    Raises:
        UserError: a shape does not fit the row.
    """
    try:
        made = step.row.transform.to_hf(*tensors)
    except RuntimeError as error:
        shapes = ", ".join(str(list(t.shape)) for t in tensors)
        raise UserError(
            f"{' and '.join(step.row.megatron)} {shapes} does not fit {step.hf[0]}: {error}"
        ) from error
    return [(name, t.to("meta")) for name, t in zip(step.hf, made, strict=True)]


def refuse(what: str, problems: Sequence[str]) -> None:
    """Raise a UserError with the first few problems of something, if there are any."""
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(f"{what}: {'; '.join(problems[:3])}{more}")
