"""Is importance what a model loses? Scores of heads against the measured loss without each.

    python -m examples.real_models.importance [smollm2 gemma3]

reads what `zeroing` and `scores` wrote, in runs/real-models or as committed in results/, and writes
importance.json and importance.png beside it. It runs on whatever is measured, and says how much.

Shapes: L layers, H heads, N texts.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from examples.real_models.texts import MEASURED
from examples.real_models.wheels import FOLDER, told
from examples.real_models.zeroing import RESULTS
from megasink.analysis.metrics import metrics
from megasink.errors import UserError
from megasink.files.atomic import atomic_text
from megasink.files.checked_fields import to_json

Floats = NDArray[np.float64]

DRAWS, SPLITS, SEED = 1000, 200, 0
ENTROPY_WEIGHT = 0.5
"""Of the entropy in the combined score; arXiv 2510.13832 tunes it."""


@dataclass(frozen=True)
class Losses:
    """What was measured of a model.

    Attributes:
        weights: hash of the model's.
        rise_LHN: rise of the loss without a head, in nats per token; of the layers measured.
        kl_LHM: divergence of the predictions, likewise; the means of M blocks of texts.
        loss_N: of the unchanged model.
        layers: of the whole model.
    """

    weights: str
    rise_LHN: Floats
    kl_LHM: Floats
    loss_N: Floats
    layers: int

    @property
    def part(self) -> str:
        """What is missing; empty if nothing is."""
        measured, texts = len(self.rise_LHN), self.rise_LHN.shape[-1]
        if measured == self.layers and texts == MEASURED:
            return ""
        layers = "" if measured == self.layers else f", layers 0 to {measured - 1} of {self.layers}"
        return f"partial: {texts} of {MEASURED} texts{layers}"


def find(name: str) -> Path:
    """Return a results file: that of this checkout's runs, or else the committed one."""
    for path in (FOLDER / name, RESULTS / name):
        if path.is_file():
            return path
    raise UserError(f"there is no {FOLDER / name}: run the commands of README.md first")


def read_losses(path: Path) -> Losses:
    """Read whole blocks; of the first block the layers from 0 on, if no block is whole.

    Raises:
        UserError: not one layer is measured.
    """
    text = path.read_bytes()
    lines = [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    facts, found, losses = lines[0], {}, {}
    for line in lines[1:]:
        if "layer" in line:
            found[line["block"], line["layer"]] = line
        else:
            losses[line["block"]] = line["loss"]
    layers = range(facts["layers"])
    blocks = [b for b in sorted(losses) if all((b, layer) in found for layer in layers)]
    if not blocks:
        blocks, layers = [0], range(next(i for i in range(len(layers)) if (0, i) not in found))
    if not layers:
        raise UserError(f"{path}: nothing is measured yet")
    rise = [np.concatenate([found[b, layer]["rise"] for b in blocks], -1) for layer in layers]
    kl = [np.stack([found[b, layer]["kl"] for b in blocks], -1) for layer in layers]
    unit, loss = facts["unit"], np.concatenate([losses[b] for b in blocks])
    values = (np.array(rise) * unit, np.array(kl) * unit, loss * unit)
    return Losses(facts["weights"], *values, facts["layers"])


def read_scores(path: Path, weights: str) -> dict[str, Floats]:
    """Return every score, high for heads that it takes for important, [L, H].

    Raises:
        UserError: the scores are of other weights.
    """
    found = json.loads(path.read_text())
    if found["weights"] != weights:
        raise UserError(f"{path} is of other weights than the losses: move it away")
    scores = {name: np.array(values) for name, values in found["scores"].items()}
    gradient, entropy = _unit(scores["mask_gradient"]), _unit(scores["aeqd"])
    for name, values in scores.items():
        if name in metrics() and metrics()[name].inactive == "above":
            scores[name] = -values
    # Two readings: P3 takes little entropy for inactive, the literature on pruning for specialized.
    for name, sign in (("low_entropy", 1 - entropy), ("high_entropy", entropy)):
        weighted = (1 - ENTROPY_WEIGHT) * gradient + ENTROPY_WEIGHT * sign
        scores[f"mask_gradient_{name}"] = weighted
    return scores


def _unit(values: Floats) -> Floats:
    return (values - values.min()) / (np.ptp(values) or 1.0)


def rank_correlation(one: Floats, other: Floats) -> float:
    """Spearman's rank correlation; NaN where either is constant."""
    return float(within_layers(one[None], other[None])[0])


def within_layers(score_LH: Floats, value_LH: Floats) -> Floats:
    """Return [L]: Spearman's rank correlation inside each layer; NaN where either is constant."""
    middle = (score_LH.shape[-1] + 1) / 2
    a, b = rankdata(score_LH, axis=-1) - middle, rankdata(value_LH, axis=-1) - middle
    norm = np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    found: Floats = np.where(norm > 0, (a * b).sum(-1) / np.where(norm > 0, norm, 1), np.nan)
    return found


def given(one_RX: Floats, other_RX: Floats, third_RX: Floats) -> Floats:
    """Return [R]: the partial rank correlation of two given a third; NaN where it is undefined."""
    pairs = ((one_RX, other_RX), (one_RX, third_RX), (other_RX, third_RX))
    both, a, b = (within_layers(x, y) for x, y in pairs)
    left = (1 - a**2) * (1 - b**2)
    found: Floats = np.where(
        left > 0, (both - a * b) / np.sqrt(np.where(left > 0, left, 1)), np.nan
    )
    return found


def known_mean(values: Floats) -> float:
    """Return the mean of the values that are not NaN; NaN if none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def kept_share(score: Floats, rise: Floats) -> float:
    """Return how much of the summed rise the better half of the heads by a score has.

    Heads with equal scores share what they have. Chance is 0.5 for an even number of heads.
    NaN where nothing rises, as in a model of random weights.
    """
    if not (total := rise.sum()):
        return float("nan")
    order = np.argsort(-score, kind="stable")
    rise = np.array([rise[score == value].mean() for value in score])
    return float(rise[order[: (len(order) + 1) // 2]].sum() / total)


def interval(draws: Floats) -> list[float]:
    """Return the 2.5 % and 97.5 % points of bootstrap draws; NaN if there is none."""
    known = draws[~np.isnan(draws)]
    points = np.quantile(known, (0.025, 0.975)) if known.size else (np.nan, np.nan)
    return [float(point) for point in points]


def compare(score_LH: Floats, value_LHN: Floats) -> dict[str, Any]:
    """Return how well a score ranks heads, with intervals by bootstrap over texts and heads.

    Within layers whole layers are drawn, and texts.

    Args:
        value_LHN: what is lost without each head, by text.
    """
    score_LH = score_LH[: len(value_LHN)]
    depth = np.repeat(np.arange(float(len(score_LH))), score_LH.shape[1])
    score, value_HN = score_LH.ravel(), value_LHN.reshape(score_LH.size, -1)
    mean_LH, (heads, texts) = value_LHN.mean(-1), value_HN.shape
    generator, chosen, means = np.random.default_rng(SEED), [], []
    for _ in range(DRAWS):
        chosen.append(generator.integers(heads, size=heads))
        means.append(value_HN[:, generator.integers(texts, size=texts)].mean(1)[chosen[-1]])
    drawn = [score[np.array(chosen)], np.array(means), depth[np.array(chosen)]]

    generator, rows = np.random.default_rng(SEED), []
    for _ in range(DRAWS):
        drawn_LH = value_LHN[:, :, generator.integers(texts, size=texts)].mean(-1)
        at = generator.integers(len(drawn_LH), size=len(drawn_LH))
        rows.append((score_LH[at], drawn_LH[at]))
    inside = within_layers(*(np.concatenate(part) for part in zip(*rows, strict=True)))

    by_layer = within_layers(score_LH, mean_LH)
    kept_L = [kept_share(s, v) * v.sum() for s, v in zip(score_LH, mean_LH, strict=True)]
    whole = [array.ravel()[None] for array in (score, mean_LH, depth)]
    return {
        "all": float(within_layers(*whole[:2])[0]),
        "all_interval": interval(within_layers(*drawn[:2])),
        "given_depth": float(given(*whole)[0]),
        "given_depth_interval": interval(given(*drawn)),
        "within": known_mean(by_layer),
        "within_interval": interval(
            np.array([known_mean(draw) for draw in inside.reshape(DRAWS, -1)])
        ),
        "by_layer": [round(float(value), 3) for value in by_layer],
        "kept": kept_share(score, mean_LH.ravel()),
        "kept_within": float(np.sum(kept_L) / mean_LH.sum()),
    }


def reachable(value_LHN: Floats) -> dict[str, float]:
    """Return what a perfect score could reach: half of the texts rank the heads for the others."""
    generator = np.random.default_rng(SEED)
    found = []
    for _ in range(SPLITS if value_LHN.shape[-1] > 1 else 0):
        one, other = np.array_split(generator.permutation(value_LHN.shape[-1]), 2)
        a, b = value_LHN[..., one].mean(-1), value_LHN[..., other].mean(-1)
        all_heads, inside = rank_correlation(a.ravel(), b.ravel()), within_layers(a, b)
        found.append((all_heads, known_mean(inside), kept_share(a.ravel(), b.ravel())))
    points = np.mean(found, 0) if found else np.full(3, np.nan)
    return dict(zip(("all", "within", "kept"), map(float, points), strict=True))


def facts_of(losses: Losses) -> dict[str, Any]:
    """Return what the losses alone show."""
    rise_HN = losses.rise_LHN.reshape(-1, losses.rise_LHN.shape[-1])
    mean = np.sort(rise_HN.mean(1))[::-1]
    error = rise_HN.std(1, ddof=1) / np.sqrt(rise_HN.shape[1]) if rise_HN.shape[1] > 1 else 0 * mean
    return {
        "texts": rise_HN.shape[1],
        "heads": len(mean),
        "loss": float(losses.loss_N.mean()),
        "median_rise": float(np.median(mean)),
        "largest_rise": float(mean[0]),
        "below_0.01": float((mean < 0.01).mean()),
        "share_of_first_tenth": float(mean[: -(-len(mean) // 10)].sum() / mean.sum()),
        "median_standard_error": float(np.median(error)),
        "median_kl": float(np.median(losses.kl_LHM.mean(-1))),
        "rank_correlation_of_kl": rank_correlation(
            losses.kl_LHM.mean(-1).ravel(), losses.rise_LHN.mean(-1).ravel()
        ),
        "resolved": float((np.abs(rise_HN.mean(1)) > 2 * error).mean()),
    }


def examine(name: str) -> dict[str, Any]:
    """Return everything about a model."""
    losses = read_losses(find(f"zeroing-{name}.jsonl"))
    scores = read_scores(find(f"scores-{name}.json"), losses.weights)
    by_measure = {}
    for measure, value_LHN in (("kl", losses.kl_LHM), ("rise", losses.rise_LHN)):
        rows = {score: compare(values, value_LHN) for score, values in scores.items()}
        by_measure[measure] = {"reachable": reachable(value_LHN), "scores": rows}
    return {"model": name, "part": losses.part, "measured": facts_of(losses), **by_measure}


def table(found: dict[str, Any]) -> str:
    """Return a model's tables in Markdown, best scores by divergence first."""
    part = f" ({found['part']})" if found["part"] else ""
    facts = ", ".join(f"{key} {value:.4g}" for key, value in found["measured"].items())
    lines = [f"{found['model']}{part}: {facts}"]
    for measure, what in (("kl", "divergence"), ("rise", "rise of the loss")):
        lines += [
            "",
            f"| score, against the {what} | all heads | within a layer | better half keeps "
            "| in each layer |",
            "|---|---|---|---|---|",
        ]
        rows = found[measure]["scores"].items()
        for name, row in sorted(rows, key=lambda item: -item[1]["all"]):
            (low, high), (least, most) = row["all_interval"], row["within_interval"]
            lines.append(
                f"| {name} | {row['all']:.2f} ({low:.2f} to {high:.2f}) | {row['within']:.2f} "
                f"({least:.2f} to {most:.2f}) | {row['kept']:.0%} | {row['kept_within']:.0%} |"
            )
        best = found[measure]["reachable"]
        lines.append(
            f"| other texts | {best['all']:.2f} | {best['within']:.2f} | {best['kept']:.0%} | |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, draw, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["smollm2", "gemma3"])
    names = parser.parse_args(arguments).models
    found = [examine(name) for name in names]
    from examples.real_models.importance_figure import draw

    with told(str(FOLDER)):
        FOLDER.mkdir(parents=True, exist_ok=True)
        text = json.dumps(to_json(found), indent=1, allow_nan=False)
        atomic_text(FOLDER / "importance.json", text + "\n")
        draw(found, FOLDER / "importance.png")
    print("\n\n".join(map(table, found)))
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "importance.py")
