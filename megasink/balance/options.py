"""Check the options of the loss, under the names of each caller."""

import math
from collections.abc import Mapping

from megasink.attention.variants import Variant

Given = Mapping[str, float]
"""{name: value} of the coefficient, the shared heads and their refresh, in this order."""


def wrong_alone(given: Given) -> list[str]:
    """Return one sentence for each option that is not a number of 0 or more."""
    return [
        f"{name} {value} is {'negative' if value < 0 else 'not finite'}: use 0 or more"
        for name, value in given.items()
        if not 0 <= value < math.inf
    ]


def wrong_together(given: Given, heads: int | None) -> list[str]:
    """Return one sentence for each conflict between options, or with the model."""
    _, (of_shared, shared), (of_refresh, refresh) = given.items()
    problems = []
    if heads and 0 < shared > heads - 2:
        problems.append(
            f"{of_shared} {shared} of {heads} heads leaves fewer than two to balance: use at most "
            f"{max(0, heads - 2)}"
        )
    if refresh > 0 and not shared:
        problems.append(f"{of_refresh} {refresh} without {of_shared}: give both")
    return problems


def without_gradient(given: Given, record: Variant, similarity: str) -> list[str]:
    """Return why attention of this variant and similarity has no gate to train, a sentence each."""
    (name, coeff), *_ = given.items()
    problems = []
    if similarity != "softmax":
        problems.append(f"similarity {similarity} has no gradient (importance is a proxy, P2.37)")
    if record.slot_value is None:
        problems.append(f"the record of variant {record.name!r} has no slot_value for its gradient")
    return [f"{name} {coeff}: {problem}: use 0" for problem in problems if coeff]
