"""Interventions: their fields, as in files, and what they do while a model runs.

A kind is one class, here or in another file of this package, which registers all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, dataclass_transform

from torch import Tensor

from megasink.analysis.capture.head_changes import ForwardPass, HeadChange, HeadOutputs
from megasink.analysis.heads import Heads, head_problems, normalized_heads
from megasink.errors import UserError
from megasink.files.checked_fields import checked
from megasink.files.json_file import read_value

KINDS: dict[str, type["Intervention"]] = {}


class Intervention(HeadChange):
    """Base of all kinds: frozen dataclasses with JSON values, which change heads or tokens."""

    kind: ClassVar[str]  # its name in files and messages
    source: ClassVar[str]  # rows of the papers

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if cls.kind in KINDS:
            raise ValueError(f"intervention {cls.kind!r} is registered twice")
        KINDS[cls.kind] = cls

    @property
    def changes_heads(self) -> bool:
        """Whether it changes the outputs of heads; otherwise only tokens."""
        return type(self).change is not Intervention.change

    def running(self) -> HeadChange:
        """Return what a probe runs: this intervention, without the state of another run."""
        return replace(self)  # type: ignore[type-var]

    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> Tensor | None:
        return None

    def tokens(self, tokens: Sequence[int], bos: int | None) -> list[int]:
        """Return the tokens that the model reads instead; `bos` is None if there is none."""
        return list(tokens)


@dataclass_transform(frozen_default=True)
def kind[C: Intervention](cls: type[C]) -> type[C]:
    """Make a frozen dataclass of a kind, which raises UserError for values of another type."""
    made = dataclass(frozen=True)(cls)
    made.__init__ = checked(made.__init__)  # type: ignore[method-assign]
    return made


def changes_of(interventions: Iterable[Intervention]) -> list[HeadChange]:
    """Return what a probe runs of the interventions that change heads."""
    return [each.running() for each in interventions if each.changes_heads]


@kind
class ZeroHeads(Intervention):
    """Replace the outputs of chosen heads by zero before the output projection.

    The bias of W_O stays, and other heads are not rescaled.
    """

    kind: ClassVar[str] = "zero-heads"
    source: ClassVar[str] = "P4.7, P3.12"

    heads: Heads  # (layer, head) pairs, both from 0; sorted, each once
    # (layers, heads) of the mask that the heads were read from, which the model must have.
    mask_shape: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", normalized_heads(self.heads))
        if self.mask_shape is not None:
            shape = tuple(self.mask_shape) if isinstance(self.mask_shape, list | tuple) else ()
            if [type(size) for size in shape] != [int, int]:
                raise UserError(f"mask_shape {self.mask_shape!r}: give [layers, heads]")
            object.__setattr__(self, "mask_shape", shape)

    def problems(self, heads: Sequence[int]) -> list[str]:
        problems = head_problems(self.heads, heads)
        shape = (len(heads), max(heads, default=0))
        if self.mask_shape is not None and self.mask_shape != shape:
            problems.append(
                f"the mask has {self.mask_shape[0]} layers of {self.mask_shape[1]} heads, but the "
                f"model has {shape[0]} of {shape[1]}"
            )
        return problems

    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> Tensor | None:
        if not (heads := heads_in(self.heads, outputs.layer)):
            return None
        out_BQHD = outputs.out_BQHD.clone()
        out_BQHD[:, :, heads] = 0.0
        return out_BQHD


@kind
class RemoveBos(Intervention):
    """Start with the first token of the text instead of BOS; positions restart at 0 (P4.3).

    A sequence that does not begin with BOS stays as it is. The remaining tokens are those of the
    sequence with BOS: nothing is tokenized again.
    """

    kind: ClassVar[str] = "remove-bos"
    source: ClassVar[str] = "P4.3"

    def tokens(self, tokens: Sequence[int], bos: int | None) -> list[int]:
        if bos is None:
            raise UserError("remove-bos: the tokenizer has no BOS to remove")
        if list(tokens) == [bos]:
            raise UserError("remove-bos: a sequence consists of BOS only and would be empty")
        return list(tokens[1:] if tokens[0] == bos else tokens)


@kind
class RepeatFirstToken(Intervention):
    """Put copies of the first token in front: of BOS, or without BOS of the text's first (P4.4).

    Only the tokens that follow may be scored, so that every number of copies is evaluated on the
    same tokens: those after the first token of the text.
    """

    kind: ClassVar[str] = "repeat-first-token"
    source: ClassVar[str] = "P4.4"

    copies: int  # number of first tokens, the original included; 1 changes nothing

    def __post_init__(self) -> None:
        if self.copies < 1:
            raise UserError(f"copies {self.copies!r}: use a whole number, 1 or more")

    def tokens(self, tokens: Sequence[int], bos: int | None) -> list[int]:
        return [*[tokens[0]] * (self.copies - 1), *tokens]


def to_entry(intervention: Intervention) -> dict[str, Any]:
    """Return an intervention as a JSON object, such as {"kind": "zero-heads", ...}."""
    own = (f.name for f in fields(intervention) if f.init)  # type: ignore[arg-type]
    return {"kind": intervention.kind} | {name: getattr(intervention, name) for name in own}


def from_entry(entry: dict[str, Any], where: str) -> Intervention:
    """Return the intervention that a JSON object describes; `where` is for errors."""
    kind = entry.get("kind")
    kind = kind if isinstance(kind, str) else repr(kind)
    if kind not in KINDS:
        raise UserError(f"{where}: kind {kind!r} is unknown: choose {', '.join(sorted(KINDS))}")
    given = {name: value for name, value in entry.items() if name != "kind"}
    try:
        return KINDS[kind](**given)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} ({kind}): {error}") from error


def read_interventions(path: Path) -> list[Intervention]:
    """Return the interventions of a JSON file: a list of objects, applied in order."""
    entries = read_value(path)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path}: write a list of objects, each with a kind")
    return [from_entry(entry, f"{path}, entry {i}") for i, entry in enumerate(entries)]


def heads_in(chosen: Heads, layer: int) -> list[int]:
    """Return the chosen heads of a layer."""
    return [head for at, head in chosen if at == layer]
