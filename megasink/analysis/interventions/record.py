"""Base class of interventions: frozen dataclasses that can be written as JSON.

Every kind is one class, registered by its name: kinds.py has those of megasink, entries.py reads
files of them. An intervention holds no state: `change` makes the object that runs (`HeadChange`).
"""

from abc import ABC
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

from megasink.analysis.metrics.registry import score_names
from megasink.errors import UserError, unknown_name
from megasink.files.checked_fields import checked

if TYPE_CHECKING:
    from megasink.analysis.capture.changes import HeadChange

KINDS: dict[str, type["Intervention"]] = {}


class Intervention(ABC):
    """Base of all kinds: a subclass is a frozen dataclass of JSON values and names its `kind`."""

    kind: ClassVar[str]
    source: ClassVar[str]

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if cls.kind in KINDS:
            raise ValueError(f"intervention {cls.kind!r} is registered twice")
        KINDS[cls.kind] = cls

    def change(self) -> "HeadChange | None":
        """Return a fresh change of the heads' outputs; None if only the tokens are changed."""
        return None

    def tokens(self, tokens: Sequence[int], bos: int | None) -> list[int]:
        """Return the tokens that the model reads instead.

        Args:
            tokens: one sequence, BOS included where the model has it.
            bos: id of BOS; None if the tokenizer has none.
        """
        return list(tokens)


@dataclass_transform(frozen_default=True)
def kind[C: Intervention](cls: type[C]) -> type[C]:
    """Make a frozen dataclass of a kind, which raises UserError for values of another type."""
    made = dataclass(frozen=True)(cls)
    made.__init__ = checked(made.__init__)  # type: ignore[method-assign]
    return made


def check_score(name: object) -> None:
    """Raise UserError unless it is one of `score_names`."""
    if name not in score_names():
        raise UserError(unknown_name("score", str(name), score_names()))


def changes_of(interventions: Iterable[Intervention]) -> "list[HeadChange]":
    """Return fresh changes of those interventions that change heads."""
    return [change for each in interventions if (change := each.change()) is not None]
