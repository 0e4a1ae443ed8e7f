"""Whether what was expected came, and what holds: from the numbers, not from the sentences.

An expectation of claims.toml and page.toml is one of:

    0.6                           a fifth more or less (`POINT`), as the rule was not written before
    [0.1, 0.2], [-inf, 0.1]       bounds
    "none"                        the model has no such number
    {other = [0, inf]}            bounds of the difference from another number; the number's own
                                  expectation has the key ""
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from examples.real_models.wheels import sources

POINT = 0.2
"""Share of a number that was expected by which what came may differ."""

HELD = ("yes", "partly", "no")


def met(expected: Any, numbers: Mapping[str, Any], name: str) -> bool:
    """Return whether a number is as expected; each value, if it has several.

    Args:
        expected: as in the file's docstring.
        numbers: name -> a value, several, or null.

    Raises:
        ValueError: an expected number is missing.
    """
    if expected == "none":
        return numbers[name] is None
    if isinstance(expected, dict):
        return all(
            met(bounds, numbers, name)
            if not other
            else _within(bounds, _known(numbers, name) - _known(numbers, other))
            for other, bounds in expected.items()
        )
    return _within(expected, _known(numbers, name))


def _known(numbers: Mapping[str, Any], name: str) -> Any:
    if numbers[name] is None:
        raise ValueError(f"{name} was expected, and was not measured")
    return np.asarray(numbers[name], dtype=np.float64)


def _within(bounds: Any, value: Any) -> bool:
    if not isinstance(bounds, list):
        bounds = sorted((bounds * (1 - POINT), bounds * (1 + POINT)))
    return bool(((value >= bounds[0]) & (value <= bounds[1])).all())


def title_of_model(name: str) -> str:
    """Return the first word of a model's title."""
    return str(sources()["models"][name]["title"]).partition("-")[0].partition(" ")[0]


def with_missed(predicted: str, missed: Sequence[str]) -> str:
    """Return what was expected, with the models in which it did not come."""
    return f"{predicted} **Missed in {' and '.join(missed)}.**" if missed else predicted


def numbers_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> number of a model of claims.json."""
    return {name: found["number"] for name, found in model["numbers"].items()}


def held(claims: Sequence[Any], model: str) -> Counter[str]:
    """Return how many claims hold in a model, in part, or not; "" has nothing to measure."""
    return Counter(claim.holds.get(model, "") for claim in claims)


def came(claim: Any, model: Mapping[str, Any]) -> bool | None:
    """Return whether what was expected of a claim came in a model of claims.json; None if nothing
    was expected, or the number is not measured."""
    numbers, expected = numbers_of(model), claim.expected.get(model["model"])
    if expected is None or (numbers[claim.number] is None and expected != "none"):
        return None
    return met(expected, numbers, claim.number)


def count_of(claims: Sequence[Any], found: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return how many expectations of claims were decided, and how many were missed."""
    decided = [came(claim, model) for model in found for claim in claims]
    return sum(one is not None for one in decided), decided.count(False)
