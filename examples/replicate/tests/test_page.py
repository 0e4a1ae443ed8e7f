"""examples/replicate/results.md is what the results files say; so are its figures and verdicts."""

import json
import re

import numpy as np
import pytest

from examples.replicate import claims, figures, record, results_page
from examples.replicate.experiment import letters, read_experiment
from examples.replicate.grid.cell_figures import title_of
from examples.replicate.tests.results import result, runs
from examples.replicate.words import spread_text
from megasink.errors import UserError

RESULTS = record.read_results()


def test_the_page_is_that_of_the_results_files():
    assert results_page.PAGE.read_text() == results_page.page(RESULTS), (
        "run python examples/replicate/page.py"
    )


def test_the_figures_are_of_the_results_files():
    for each in RESULTS:
        for name in figures.names(each):
            found = figures.read_source((results_page.FIGURES / name).read_bytes())
            assert found == figures.source_of(each), (
                f"{name}: run python examples/replicate/page.py"
            )
    there = {path.name for path in results_page.FIGURES.glob("results-*.png")}
    assert there == {name for each in RESULTS for name in figures.names(each)}


def test_titles_of_figures_are_words():
    names = {name for each in RESULTS for name in (*each.metrics, *each.curves)}
    titles = [title_of(name)[0] for name in sorted(names)]
    assert len(titles) >= 40
    assert [title for title in titles if "/" in title or "_" in title or "…" in title] == []
    assert title_of("ablation/awft/removable") == ("heads that can go, by AWFT", "% of heads")


@pytest.mark.parametrize("each", RESULTS, ids=[each.name for each in RESULTS])
def test_verdicts_and_prediction_are_those_of_the_experiment(each):
    experiment = read_experiment(letters()[each.experiment], each.form)
    assert each.verdicts == claims.verdicts(experiment.claims, each.cells)
    assert (each.prediction, each.predicted) == (experiment.prediction, experiment.predicted)
    assert each.predicted <= each.date
    assert list(each.cells) == experiment.cells


def test_a_results_file_returns_as_it_was(tmp_path):
    path = record.write_result(result(), tmp_path)
    assert record.read_result(path) == result()
    record.write_result(result("a", "full"), tmp_path)
    record.write_result(result("a", "fast"), tmp_path)
    names = [each.name for each in record.read_results(tmp_path)]
    assert names == ["a-full", "a-fast", "z-fast"]
    changed = json.loads(path.read_text()) | {"format": 99}
    path.write_text(json.dumps(changed))
    with pytest.raises(UserError, match="has format 99"):
        record.read_result(path)


def test_the_page_has_every_part():
    text = results_page.page([result()])
    assert (
        "**Predicted on 2026-11-22, before the first run.** The loss evens the heads out." in text
    )
    assert "| Head balance (z) | fast | 1 | 0 | 0 | 1 | 3 min |" in text
    assert "| sink, loss | 0.120 ± 0.010 | 0.40 ± 0.10 |" in text
    assert "| sink, no loss | 0.820 ± 0.010 | 0.350 ± 0.071 (2 of 3) |" in text
    assert (
        "The loss lowers the imbalance \\| of sinks (imbalance) | P0 Fig. 5: 0.9 -> 0.3 |" in text
    )
    assert (
        "**reproduces**: sink, loss 0.120 ± 0.010; sink, no loss 0.820 ± 0.010; difference 0.7,"
        in text
    )
    assert "**not measured**: fewer than 3 runs" in text
    assert "| E norm(c)² | P4 Eq. 11 | 0.5 | 0.51 | 0.49 to 0.53 |" in text
    assert "```text\nmegasink train --tiny\n```" in text
    assert "6 runs (seeds 1, 2, 3), 2 min one after another, 3 min of CPU time, on 2 cores" in text
    for name in figures.names(result()):
        assert f"(figures/{name})" in text
    rows = re.findall(r"^\|.*\|$", text, re.M)
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) > 1
    assert "{" not in text


def test_figures_carry_what_they_were_drawn_from():
    drawn = figures.draw(result())
    assert list(drawn) == figures.names(result())
    assert list(drawn) == [
        "results-z-fast.png",
        "results-z-fast-curves.png",
        "results-z-fast-heads.png",
    ]
    other = result()
    other.cells["sink, loss"]["imbalance"][0] = 0.5
    for png in drawn.values():
        assert figures.read_source(png) == figures.source_of(result()) != figures.source_of(other)
    plain = result()
    plain.curves, plain.maps = {}, {}
    assert figures.names(plain) == ["results-z-fast.png"]


def test_curves_over_seeds():
    curve = record.curve_of(runs()[:3], "imbalance")
    assert curve.steps == [0, 50, 100]
    np.testing.assert_allclose(curve.mean, [0, 0.06, 0.12])
    np.testing.assert_allclose(curve.deviation, [0, 0.005, 0.01])
    assert record.curve_of(runs(), "loss") is None
    short = runs()[:2]
    short[1].curves = {"imbalance": ([0, 50], [0.0, None])}
    short[0].curves = {"imbalance": ([0, 50, 100], [0.0, 1.0, 2.0])}
    lacking = record.curve_of(short, "imbalance")
    assert lacking.mean == [0, 1, 2]
    assert lacking.deviation == [0, None, None]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.234, 1.236, 1.238], "1.2360 ± 0.0020"),
        ([0.5, 0.5, 0.5], "0.5 ± 0"),
        ([None, None], "- (0 of 2)"),
        ([3.0, None], "3 (1 of 2)"),
        ([100.0, 300.0, 200.0], "200 ± 100"),
        ([1e-7, 2e-7, 3e-7], "2e-07 ± 1e-07"),
    ],
)
def test_numbers_with_their_spread(values, text):
    assert spread_text(values) == text
