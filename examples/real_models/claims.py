"""What the papers claim, measured on real models.

    python -m examples.real_models.claims runs/real-models/smollm2 runs/real-models/gemma3

measures whatever is missing (more than an hour a model on one thread), and writes claims.json and
claims.png to runs/real-models: for each claim of claims.toml its number in each model, with the
interval of a bootstrap over texts. A command that was killed goes on.
"""

import argparse
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from examples.real_models import numbers_circuit  # noqa: F401  # registers the numbers of P4
from examples.real_models.analyses import Subject
from examples.real_models.importance import SEED
from examples.real_models.numbers import (
    NUMBERS,
    Estimate,
    ablation_lines,
    sink_rates,
    unchanged_loss,
)
from examples.real_models.numbers_inactive import cut_curves, task_curves
from examples.real_models.wheels import FOLDER, told
from megasink.files.atomic import atomic_text
from megasink.files.checked_fields import to_json

CLAIMS_FILE = Path(__file__).with_name("claims.toml")
DRAWS = 2000


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Attributes:
        paper: such as "P2"; rows: of the paper's list, and its figures.
        says: the claim; published: the paper's own number.
        number: name of the function that measures it.
        predicted: before the measurement; verdict: after it.
        expected: model -> what was predicted, for `expected.met`.
        holds: model -> whether the claim does: yes, partly or no; without the models that have
            nothing to measure.
        also: words -> name of a further number that stands beside the first.
    """

    paper: str
    rows: str
    says: str
    published: str
    number: str
    predicted: str
    expected: dict[str, Any]
    verdict: str
    holds: dict[str, str]
    also: dict[str, str] = field(default_factory=dict)

    @property
    def numbers(self) -> list[str]:
        """Every number of the claim."""
        return [self.number, *self.also.values()]


def claims() -> list[Claim]:
    """Return the claims of claims.toml, in order."""
    return [Claim(**table) for table in tomllib.loads(CLAIMS_FILE.read_text())["claim"]]


def measured(value: Any) -> dict[str, Any]:
    """Return a number, its interval (95 %) and the texts it is the mean of; null where it is NaN.

    Args:
        value: [texts], a float, which has no interval, or an `Estimate`.
    """
    if isinstance(value, Estimate):
        return {**value._asdict(), "interval": list(value.interval)}
    values = np.asarray(value, dtype=np.float64)
    texts = values[~np.isnan(values)]
    if not values.ndim or len(texts) < 2:
        number = float(texts.mean()) if texts.size else float("nan")
        return {"number": number, "interval": None, "texts": None}
    generator = np.random.default_rng(SEED)
    means = texts[generator.integers(len(texts), size=(DRAWS, len(texts)))].mean(1)
    interval = [float(point) for point in np.quantile(means, (0.025, 0.975))]
    return {"number": float(texts.mean()), "interval": interval, "texts": len(texts)}


def curves(subject: Subject) -> dict[str, Any]:
    """Return what the figure draws: by layer, by length, and of the ablation."""
    text, found = subject.samples("text"), {}
    if subject.has_bos:
        bos = subject.samples("bos")
        found = {
            "sink_rate_by_layer_bos": (bos["awft"] > 0.3).mean((0, 2)).tolist(),
            "massive_ratio_bos": np.nanmean(bos["massive_ratio"], 0).tolist(),
        }
    return found | {
        "sink_rates": sink_rates(subject),
        "sink_rate_by_layer": (text["awft"] > 0.3).mean((0, 2)).tolist(),
        "massive_ratio": np.nanmean(text["massive_ratio"], 0).tolist(),
        "ablation": ablation_lines(subject),
        "loss": unchanged_loss(subject),
        "task": task_curves(subject),
        "cut": cut_curves(subject),
    }


def examine(subject: Subject, names: Sequence[str]) -> dict[str, Any]:
    """Return every number of a model, and its curves."""
    return {
        "model": subject.name,
        "numbers": {name: measured(NUMBERS[name](subject)) for name in names},
        "curves": curves(subject),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="Hugging Face folders")
    folders = parser.parse_args(arguments).models
    names = [name for claim in claims() for name in claim.numbers]
    found = [examine(Subject(folder), names) for folder in folders]
    from examples.real_models.claims_figure import draw

    with told(str(FOLDER)):
        text = json.dumps(to_json(found), indent=1, allow_nan=False)
        atomic_text(FOLDER / "claims.json", text + "\n")
        draw(found, FOLDER / "claims.png")
    for claim in claims():
        values = [model["numbers"][claim.number]["number"] for model in found]
        print(f"{claim.rows}: {claim.says}: " + ", ".join(f"{value:.3g}" for value in values))
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "claims.py")
