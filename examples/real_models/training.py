"""What balance.py and surgery.py found: numbers for page and picture, from the lines of results.

Shapes: S seeds, L layers, H heads, B blocks, N texts.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from examples.real_models.claims import measured
from megasink.analysis.metrics.residual_stream import longest_first_token

Floats = NDArray[np.float64]

LOW, HIGH, SHARED = 0.3, 0.8, 3
"""Importance of a head that is low; share of its layer's highest that is beside it; the m of P0."""


def read_lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the facts of a file of results, and its lines."""
    facts, *lines = map(json.loads, path.read_text().splitlines())
    return facts, lines


def importance_of(line: dict[str, Any]) -> Floats:
    return np.array(line["importance"])


def _margin(line: dict[str, Any]) -> Floats:
    quiz = np.array(line["quiz"])
    difference: Floats = quiz[:, 0] - quiz[:, 1]
    return difference


def _of_shared(after: dict[str, Any], before: dict[str, Any]) -> float:
    """Return the mean change of the heads that were each layer's three highest."""
    at = np.argsort(-importance_of(before), 1)[:, :SHARED]
    change = importance_of(after) - importance_of(before)
    return float(np.take_along_axis(change, at, 1).mean())


def _rise_of_low(after: dict[str, Any], before: dict[str, Any]) -> float:
    low = importance_of(before) < LOW
    return (
        float((importance_of(after) - importance_of(before))[low].mean()) if low.any() else np.nan
    )


def _of_low(what: Callable[[Floats, Floats], NDArray[np.bool_]]) -> Callable[..., float]:
    """Return a function that gives of what share of the heads that were low something holds."""

    def share(after: dict[str, Any], before: dict[str, Any]) -> float:
        held = what(importance_of(after), importance_of(before))
        return float(held[importance_of(before) < LOW].mean())

    return share


NUMBERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], float]] = {
    "head imbalance (Eq. 6)": lambda after, _: after["imbalance"],
    "mean importance": lambda after, _: float(importance_of(after).mean()),
    f"rise of the heads that were below {LOW}": _rise_of_low,
    "of these heads, share that rose": _of_low(lambda after, before: after > before),
    "share that is within 20 % of its layer's highest": _of_low(
        lambda after_LH, _: after_LH >= HIGH * after_LH.max(1, keepdims=True)
    ),
    "rise of each layer's three highest": _of_shared,
    "rank correlation of heads with before": lambda after, before: float(
        stats.spearmanr(importance_of(after).ravel(), importance_of(before).ravel()).statistic
    ),
    "held-out loss": lambda after, _: after.get("held_out", np.nan),
    "quiz, share right": lambda after, _: float((_margin(after) > 0).mean()),
    "quiz, margin in nats per token": lambda after, _: float(_margin(after).mean()),
}
"""What is measured of a run, beside the model before it."""


def by_seed(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Floats]]]:
    """Return what was measured before, and arm -> number -> [S], of seeds that all arms have."""
    facts, lines = read_lines(path)
    (before,) = (line for line in lines if line["arm"] == "before")
    runs = {(line["arm"], line["seed"]): line for line in lines if line["arm"] != "before"}
    seeds = [s for s in range(len(runs)) if all((arm, s) in runs for arm in facts["arms"])]
    found = {
        arm: {
            name: np.array([number(runs[arm, seed], before) for seed in seeds])
            for name, number in NUMBERS.items()
        }
        for arm in facts["arms"]
    }
    return before, found


def difference(one: Floats, other: Floats) -> dict[str, Any]:
    """Return the mean of paired differences, and their interval (95 %) by Student's t."""
    apart = one - other
    found: dict[str, Any] = {"number": float(apart.mean()), "interval": None}
    if len(apart) > 1:
        half = float(stats.t.ppf(0.975, len(apart) - 1) * apart.std(ddof=1) / len(apart) ** 0.5)
        found["interval"] = [found["number"] - half, found["number"] + half]
    return found


def surgery(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return (arm, steps) -> what was measured; gates begin as the model does."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line in read_lines(path)[1]:
        found.setdefault((line["arm"], line["steps"]), {}).update(line)
    found[("gated", 0)] = found[("vanilla", 0)]
    return found


def surgery_numbers(stage: dict[str, Any], model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the page shows of an arm after some steps.

    Args:
        model: the model as it was.
    """
    loss, block = np.array(stage["loss"]), longest_first_token(np.array(model["massive_ratio"]))
    found = {
        "loss, nats per token": measured(loss),
        "rise over the model as it was": measured(loss - np.array(model["loss"])),
        "attention to the first token": measured(stage["awft_by_text"]),
        "sink rate": measured(stage["sink_rate"]),
        f"norm of the first state over the others', after block {block}": measured(
            stage["massive_ratio"][2 * block + 2]
        ),
    }
    if "losses" in stage:
        plain = np.array(stage["losses"]["none"])
        for name, values in stage["losses"].items():
            if name != "none":
                found[f"rounded, {name}: rise of the loss"] = measured(np.array(values) - plain)
        longest = np.array(stage["longest"])
        found["norm of any token's state over the median, largest"] = measured(longest)
        found["share of texts in which it is above 10"] = measured(float((longest > 10).mean()))
        for name, values in stage["kurtosis"].items():
            found[f"kurtosis of the states, {name}: largest"] = measured(max(values))
    return found


def balance_checks(path: Path) -> dict[str, Any]:
    """Return what expectations are of: `ARM: NUMBER` of each seed, and beside it `less before`,
    `over before`, `less none` and, 0 or 1, `resolved from none`."""
    before, arms = by_seed(path)
    found: dict[str, Any] = {}
    for arm, numbers in arms.items():
        for name, value_S in numbers.items():
            start, none_S = NUMBERS[name](before, before), arms["none"][name]
            low, high = difference(value_S, none_S)["interval"] or (-np.inf, np.inf)
            found |= {
                f"{arm}: {name}": value_S,
                f"{arm}: {name}, less before": value_S - start,
                f"{arm}: {name}, over before": value_S / start if start else None,
                f"{arm}: {name}, less none": (value_S - none_S).mean(),
                f"{arm}: {name}, resolved from none": float(low > 0 or high < 0),
            }
    return found


def surgery_checks(path: Path) -> dict[str, Any]:
    """Return what expectations are of: `ARM at STEPS: NUMBER`, and beside it `over the model` as it
    was and `less vanilla` after the same steps; `ARM after` has all steps but 0."""
    stages, found = surgery(path), {}
    model = stages["vanilla", 0]
    numbers = {
        stage: {k: v["number"] for k, v in surgery_numbers(what, model).items()}
        for stage, what in stages.items()
    }
    for (arm, steps), values in numbers.items():
        for name, value in values.items():
            start, plain = (numbers["vanilla", at].get(name) for at in (0, steps))
            of = f"{arm} at {steps}: {name}"
            found[of] = value
            found[f"{of}, over the model"] = value / start if start else None
            found[f"{of}, less vanilla"] = None if plain is None else value - plain
    for arm in {arm for arm, _ in numbers}:
        after = [of for of in found if of.startswith(f"{arm} at ") and " at 0:" not in of]
        for name in dict.fromkeys(of.partition(": ")[2] for of in after):
            found[f"{arm} after: {name}"] = [
                found[of] for of in after if of.endswith(f": {name}") and found[of] is not None
            ]
    return found
