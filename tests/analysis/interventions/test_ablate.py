"""`megasink ablate` on texts: every point against the model zeroed by hand.

Shapes: N samples, T tokens, L layers, H heads, D head dim.
"""

import csv
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch

from megasink.analysis.ablate import run_ablation
from megasink.analysis.ablate.quality_curves import kept_level, normalized_auc, removable
from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.analysis.metrics.inactive_heads import published_quantile
from megasink.analysis.metrics.pca_tsne import Embedding
from megasink.analysis.pages.ablation_page import best_of, in_words
from megasink.analysis.pages.html import PAPERS
from megasink.analysis.result_schemas import ALL, mean_line
from megasink.cli import main
from megasink.errors import UserError
from tests.analysis.interventions.ablating import (
    HEADS,
    PERCENTS,
    ByHand,
    command,
    never,
    results_of,
)
from tests.distributed.layout import Layout

LINKS = {f"https://arxiv.org/abs/{number}" for _, number in PAPERS.values()}
FLAGS = ("--score", "ahon_ln", "--heads", "0.1", "1.2", "--layer", "1")


@pytest.fixture(scope="module")
def swept(folder):
    assert main(command(folder, folder / "out", *FLAGS)) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def by_hand(folder):
    return ByHand(folder)


def test_the_thresholds_are_published_quantiles(swept, by_hand):
    found = results_of(swept)
    _, _, scores, _ = by_hand.run(never)
    for percent in PERCENTS:
        expected = published_quantile(scores, percent / 100)
        assert found.thresholds["ahon_ln"][str(percent)] == pytest.approx(expected, rel=1e-5)


def test_every_point_equals_the_model_zeroed_by_hand(swept, by_hand):
    found = results_of(swept)
    masks = np.load(swept / "points.npz")
    before, targets, _, _ = by_hand.run(never)
    rules = {"unchanged": never, "heads 0.1, 1.2": lambda at, h, _: (at, h) in {(0, 1), (1, 2)}}
    for head in range(HEADS):
        rules[f"head 1.{head}"] = lambda at, h, _, head=head: (at, h) == (1, head)
    for percent, tau in found.thresholds["ahon_ln"].items():
        # A threshold is one of the scores; by hand, that score may differ by its rounding.
        rules[f"ahon_ln/{percent}"] = lambda at, h, score, tau=tau: score < tau * (1 - 1e-6)
    seen = set()
    for point in found.points:
        if point.row == "random":
            continue
        nats, _, _, mask = by_hand.run(rules[point.label])
        for on, chosen in (("first", [0, 1]), ("second", [2]), (ALL, [0, 1, 2])):
            value, size = point.values[on], targets[chosen].sum()
            assert value.value == pytest.approx(nats[chosen].sum() / size, rel=1e-5)
            change = (nats - before)[chosen].sum() / size
            assert value.change == pytest.approx(change, abs=1e-5)
            assert value.samples == len(chosen)
        seen.add(round(point.values[ALL].value, 5))
        if point.row == "ahon_ln":
            assert point.zeroed == pytest.approx(100 * mask.mean())
            np.testing.assert_allclose(masks[point.label], mask.mean(0))
            # Layer 1 is scored after layer 0 lost heads, so this is near the share, not equal.
            assert point.zeroed == pytest.approx(point.asked, abs=13)
    assert len(seen) >= 7


@pytest.mark.usefixtures("undrawn")
def test_the_gradient_zeroes_the_same_heads_in_every_text(folder, by_hand, tmp_path):
    """Those with the lowest mean over texts of |slope of the loss|, by differences by hand."""
    assert main(command(folder, tmp_path, "--score", "gradient")) == 0
    found, masks = results_of(tmp_path), np.load(tmp_path / "points.npz")
    mean_LH = np.asarray(
        [[by_hand.slopes(layer, head) for head in range(HEADS)] for layer in (0, 1)]
    )
    mean_LH, at_0 = np.abs(mean_LH).mean(-1), found.of("gradient")[0]
    assert at_0.values == found.unchanged.values
    for point in found.of("gradient"):
        expected = published_quantile(mean_LH, point.asked / 100)
        assert found.thresholds["gradient"][f"{point.asked:g}"] == pytest.approx(expected, rel=0.02)
        mask_LH = mean_LH < expected * (1 - 1e-6)
        np.testing.assert_array_equal(masks[point.label], mask_LH)
        assert point.zeroed == 100 * mask_LH.mean()
        nats, targets, _, _ = by_hand.run(lambda at, h, _, mask=mask_LH: bool(mask[at, h]))
        assert point.values[ALL].value == pytest.approx(nats.sum() / targets.sum(), rel=1e-5)
    assert found.of("gradient")[-1].zeroed > 0


def test_standard_errors_are_of_paired_differences(swept, by_hand):
    before, targets, _, _ = by_hand.run(never)
    nats, _, _, _ = by_hand.run(lambda at, h, _: (at, h) in {(0, 1), (1, 2)})
    (point,) = results_of(swept).of("--heads")
    lost = nats - before
    ratio = lost.sum() / targets.sum()
    error = math.sqrt(((lost - ratio * targets) ** 2).sum() / 2 * 3) / targets.sum()
    assert point.values[ALL].standard_error == pytest.approx(error, rel=1e-3)
    assert point.values["second"].standard_error is None


def test_the_summary_has_the_loss_without_the_heads_given(swept):
    results = results_of(swept)
    (point,) = results.of("--heads")
    value, before = point.values[ALL].value, results.unchanged.values[ALL].value
    page = (swept / "report.html").read_text()
    assert f"without changes. heads 0.1, 1.2: {value:.4f} ({value - before:+.4f})." in page


def test_the_summary_names_a_best_score_only_beyond_its_interval(swept):
    results = results_of(swept)
    assert not any(
        curve.rank == 1 and best_of([curve], higher_is_better=False)
        for curve in results.curves
        if curve.score == "random"
    )
    for curve in results.curves:
        curve.rank = 1 + (curve.score == "random")
        if curve.score != "random":
            curve.over_random, curve.over_random_interval = -0.003, 0.004
    assert all("No score's curve is better than" in line for line in in_words(results))
    for curve in results.curves:
        curve.over_random_interval = 0.002
    for line in in_words(results):
        assert "Best by AUC: AHON (LN) (-0.0030 ± 0.0020 against random)." in line
    for curve in results.curves:
        curve.over_random = 0.003  # beyond its interval, but worse than random heads
    assert not any("Best" in line for line in in_words(results))


def test_the_random_baseline(swept):
    found = results_of(swept)
    points = found.of("random")
    assert [(p.seed, p.asked) for p in points] == [(s, p) for s in (4, 5) for p in PERCENTS[1:]]
    masks = np.load(swept / "points.npz")
    assert not np.array_equal(masks["random/30/seed 4"], masks["random/30/seed 5"])
    for point in points:
        assert point.zeroed == pytest.approx(100 * masks[point.label].mean())
    assert len({point.values[ALL].value for point in points}) > 2


def test_a_score_without_a_point_at_0_begins_with_the_unchanged_model(swept):
    found = results_of(swept)
    (at_0, *later) = found.of("ahon_ln")
    assert found.line("ahon_ln")[0.0] == [at_0] != [found.unchanged]
    without = replace(found, points=[point for point in found.points if point is not at_0])
    assert without.line("ahon_ln") == {0.0: [found.unchanged]} | {p.asked: [p] for p in later}


def test_curves_follow_from_the_points(swept, by_hand):
    found = results_of(swept)
    _, targets, _, _ = by_hand.run(never)
    for on in ("first", "second", ALL):
        curves = {curve.score: curve for curve in found.curves if curve.on == on}
        baseline = found.unchanged.values[on].value
        lines = {
            "ahon_ln": [(p.zeroed, p.values[on].value) for p in found.of("ahon_ln")],
            "random": [(0.0, baseline)],
        }
        for percent in PERCENTS[1:]:
            of = [p for p in found.of("random") if p.asked == percent]
            means = ([p.zeroed for p in of], [p.values[on].value for p in of])
            lines["random"].append(tuple(map(np.mean, means)))
        for score, line in lines.items():
            x, y = zip(*line, strict=True)
            curve = curves[score]
            assert curve.auc == pytest.approx(normalized_auc(x, y))
            level = kept_level(baseline, higher_is_better=False)
            expected = removable(x, y, level, higher_is_better=False)
            assert curve.removable == pytest.approx(expected.percent)
            assert curve.never_left == expected.never_left
            assert curve.measured_to == pytest.approx(max(x))
        better = min(curves.values(), key=lambda curve: curve.auc)
        assert better.rank == 1
        assert sorted(curve.rank for curve in curves.values()) == [1, 2]
        assert list(curves["random"].auc_by_seed) == ["4", "5"]
        apart = curves["ahon_ln"].auc - curves["random"].auc
        interval = curves["ahon_ln"].over_random_interval
        if on == "second":  # one text
            assert interval is None
            continue
        assert curves["ahon_ln"].over_random == pytest.approx(apart)
        assert interval == pytest.approx(_interval(found, swept, on, targets))


def _interval(found, swept, on, targets):
    """Half-width of the 95 % interval of the AUC over that of random heads, text by text."""
    chosen = {"first": [0, 1], ALL: [0, 1, 2]}[on]
    area = np.zeros(len(chosen))
    for sign, score, seeds in ((1, "ahon_ln", (None,)), (-1, "random", (4, 5))):
        for seed in seeds:
            points = [p for p in found.of(score) if p.seed == seed]
            rows = [points, [found.unchanged, *points]][score == "random"]
            nats = [_nats(swept, point.key) for point in rows]
            x, _ = mean_line(found.line(score), on)
            area += sign / len(seeds) * np.trapezoid(nats, x, axis=0)[chosen] / (x[-1] - x[0])
    residual = area - area.sum() / targets[chosen].sum() * targets[chosen]
    n = len(chosen)
    error = math.sqrt((residual**2).sum() / (n - 1) * n) / targets[chosen].sum()
    return scipy.stats.t.ppf(0.975, n - 1) * error


def _nats(swept, key):
    point = json.loads((swept / "points" / f"{key}.json").read_text())
    return [text["nats"] for text in point["texts"]]


def test_the_files(swept):
    found = results_of(swept)
    with (swept / "ablation.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3 * len(found.points)
    for line in lines:
        (point,) = (p for p in found.points if p.label == line["label"])
        assert float(line["value"]) == point.values[line["on"]].value
        assert float(line["bits_per_byte"]) == point.values[line["on"]].bits_per_byte
    for name in ("curves", "ranks", "masks", "given", "single_heads"):
        assert (swept / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    html = (swept / "report.html").read_text()
    assert html.count("<img ") == html.count("<summary>The numbers</summary>") == 5
    assert set(re.findall(r'(?:src|href)="(?!data:|#)([^"]+)"', html)) <= LINKS


@pytest.mark.usefixtures("undrawn")
def test_activations_of_layer_0_with_each_head_zeroed(folder, tmp_path, by_hand, monkeypatch):
    """The rows that t-SNE gets, in its place; and nothing runs again."""
    rows = []

    def kept(rows_NX, seed):
        rows.append(rows_NX)
        return Embedding(rows_NX, 1.0, 0.0)

    monkeypatch.setattr(run_ablation, "neighbor_embedding", kept)
    for _ in range(2):
        assert main(command(folder, tmp_path, "--layer", "0")) == 0
    assert len(rows) == 1 + HEADS
    with np.load(tmp_path / "tsne.npz") as arrays:
        found = dict(arrays)
    np.testing.assert_array_equal(found.pop("position_N"), np.tile(np.arange(8), 3))
    assert list(found) == ["unchanged", *(f"head 0.{head}" for head in range(HEADS))]
    for number, points in enumerate(found.values()):
        by_hand.run(lambda layer, head, _, n=number: (layer, head + 1) == (0, n))
        expected = torch.cat([product_TX[:8] for product_TX in by_hand.activations])
        np.testing.assert_allclose(points, expected, rtol=1e-4, atol=1e-6)
    assert not np.allclose(found["unchanged"], found["head 0.1"])


@pytest.mark.usefixtures("undrawn")
def test_points_are_measured_once(folder, swept, tmp_path, forwards):
    """Repeated, extended, and killed after some points."""
    points = len(results_of(swept).points)
    assert main(command(folder, swept, *FLAGS)) == 0
    assert not forwards
    assert main(command(folder, tmp_path, "--score", "ahon_ln")) == 0
    some = 1 + 2 * 2 + len(PERCENTS)
    assert len(forwards) == some + 1  # one more for the thresholds
    forwards.clear()
    assert main(command(folder, tmp_path, *FLAGS)) == 0
    assert len(forwards) == points - some
    ours, theirs = ((path / "ablation.json").read_text() for path in (tmp_path, swept))
    assert ours == theirs


@pytest.mark.usefixtures("undrawn")
def test_a_killed_sweep_goes_on(folder, swept, tmp_path, forwards, monkeypatch):
    count = len(results_of(swept).points)
    with monkeypatch.context() as patch:
        forward = TransformersProbe.forward

        def failing(probe, *args, **kwargs):
            if len(forwards) == 6:  # within the sixth point
                raise UserError("the machine is gone")
            return forward(probe, *args, **kwargs)

        patch.setattr(TransformersProbe, "forward", failing)
        assert main(command(folder, tmp_path, *FLAGS)) == 2
    assert not (tmp_path / "ablation.json").exists()
    assert len(list((tmp_path / "points").glob("*.json"))) == 5
    assert main(command(folder, tmp_path, *FLAGS)) == 0
    assert len(forwards) == count + 1
    for name in ("ablation.json", "ablation.csv"):
        assert (tmp_path / name).read_text() == (swept / name).read_text()


def test_two_processes_share_the_points(folder, swept, pool, tmp_path):
    arguments = {
        "command": " ".join(command(folder, tmp_path / "out", *FLAGS)),
        "store": str(tmp_path / "store"),
    }
    assert pool.run("tests.analysis.interventions.tasks:ablated", Layout(dp=2), **arguments) == [
        0,
        0,
    ]
    for name in ("ablation.json", "ablation.csv"):
        assert (tmp_path / "out" / name).read_text() == (swept / name).read_text()
