"""Replace the tokens at chosen positions of every sequence: random ones, or one fixed token.

Training, its evaluations and the analyses share this definition (P2.15, P2.16). Positions count
from 0 in the sequence that attention sees: the paper's x_1 is at position 0.

Shapes: P positions, V ids to draw from.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megasink.errors import UserError

if TYPE_CHECKING:  # a refused command line must not wait for numpy
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]


RANDOM = "random"
FORMS = f"{RANDOM}, ID"
"""Values of --replace-tokens-with, as the help shows them."""


def problems_of(positions: Sequence[int] | None, value: str | None) -> list[str]:
    """Return one message per problem of the two flags."""
    at = "--replace-tokens-at"
    if not all(isinstance(position, int) for position in positions or ()):
        return [f"{at} {positions}: use whole numbers"]
    if not positions:
        return [f"--replace-tokens-with {value} needs {at}: pass the positions"] if value else []
    problems = [
        f"{at} {position} is negative: positions count from 0"
        for position in positions
        if position < 0
    ]
    if len(set(positions)) < len(positions):
        problems.append(f"{at} {' '.join(map(str, positions))}: pass each position once")
    if value is None:
        return [*problems, f"{at} needs --replace-tokens-with: use one of {FORMS}"]
    if not re.fullmatch(f"{RANDOM}|[0-9]{{1,9}}", str(value)):
        use = "use random, or a token id (0 or more)"
        problems.append(f"--replace-tokens-with {value}: {use}")
    return problems


@dataclass(frozen=True, eq=False)
class Replacement:
    """The replaced positions of every sequence, and the replacement."""

    positions: tuple[int, ...]  # in a sequence, from 0
    value: str  # of --replace-tokens-with
    seed: int  # of random tokens
    drawn_from_V: "Ids"  # ids of random tokens

    @property
    def description(self) -> str:
        """The replacement in words."""
        places = ", ".join(map(str, self.positions))
        noun = "position" if len(self.positions) == 1 else "positions"
        tokens = "random tokens" if self.value == RANDOM else f"token {int(self.value)}"
        return f"{tokens} at {noun} {places}"

    def at(self, length: int) -> list[int]:
        """Return the positions within a sequence of this many tokens."""
        return [position for position in self.positions if position < length]

    def replace(self, sequence: "Ids", *key: int) -> None:
        """Replace tokens of a sequence in place; each depends on its seed, key and position."""
        for position in self.at(len(sequence)):
            if self.value != RANDOM:
                sequence[position] = int(self.value)
                continue
            # A hash: seeding a generator takes a millisecond, and numbers may change by release.
            text = ",".join(map(str, (self.seed, *key, position)))
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            number = int.from_bytes(digest, "big") % len(self.drawn_from_V)
            sequence[position] = self.drawn_from_V[number]


def replacement(
    positions: Sequence[int], value: str, *, seed: int, tokenizer: Any, size: int
) -> Replacement:
    """Return the replacement that the flags select, for a model with `size` token ids."""
    # Random tokens are uniform over the vocabulary without special tokens (P2.5).
    import numpy as np

    if problems := problems_of(positions, value):
        raise UserError(problems[0])
    special = set() if tokenizer is None else set(tokenizer.all_special_ids)
    ids = range(size) if tokenizer is None else tokenizer.get_vocab().values()
    drawn_from = sorted(i for i in set(ids) - special if i < size)
    drawn_from_V = np.array(drawn_from, dtype=np.int64)
    problem = None
    if value == RANDOM and not len(drawn_from_V):
        problem = "every token of the vocabulary is special"
    elif value != RANDOM and int(value) >= size:
        problem = f"the vocabulary has the ids 0 to {size - 1:,}"
    if problem:
        raise UserError(f"--replace-tokens-with {value}: {problem}")
    return Replacement(tuple(sorted(positions)), value, seed, drawn_from_V)
