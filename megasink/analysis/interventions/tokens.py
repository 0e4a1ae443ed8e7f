"""Interventions on the tokens alone: BOS removed, the first token repeated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megasink.analysis.interventions.record import Intervention
from megasink.errors import UserError


@dataclass(frozen=True)
class RemoveBos(Intervention):
    """Start with the first token of the text instead of BOS; positions restart at 0 (P4.3).

    A sequence that does not begin with BOS stays as it is. The remaining tokens are those of the
    sequence with BOS: nothing is tokenized again.
    """

    kind: ClassVar[str] = "remove-bos"
    source: ClassVar[str] = "P4.3"

    def tokens(self, tokens: Sequence[int], bos: int | None) -> list[int]:
        """See `Intervention.tokens`.

        Raises:
            UserError: the tokenizer has no BOS, or the sequence is nothing but BOS.
        """
        if bos is None:
            raise UserError("remove-bos: the tokenizer has no BOS to remove")
        if list(tokens) == [bos]:
            raise UserError("remove-bos: a sequence is nothing but BOS, and would be empty")
        return list(tokens[1:] if tokens[0] == bos else tokens)


@dataclass(frozen=True)
class RepeatFirstToken(Intervention):
    """Put copies of the first token in front: of BOS, or without BOS of the text's first (P4.4).

    Only the tokens that follow may be scored, so that every number of copies is evaluated on the
    same tokens: those after the first token of the text.

    Attributes:
        copies: how often the first token stands there, itself included; 1 changes nothing.
    """

    kind: ClassVar[str] = "repeat-first-token"
    source: ClassVar[str] = "P4.4"

    copies: int

    def __post_init__(self) -> None:
        if type(self.copies) is not int or self.copies < 1:
            raise ValueError(f"copies {self.copies!r}: a whole number from 1 on")

    def tokens(self, tokens: Sequence[int], bos: int | None) -> list[int]:
        """See `Intervention.tokens`."""
        return [*[tokens[0]] * (self.copies - 1), *tokens]
