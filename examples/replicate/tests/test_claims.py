"""Verdicts: the tests against definitions written out, error rates, what is refused."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from examples.replicate import claims
from examples.replicate.claims import KINDS, NOT_MEASURED, NOT_SHOWN, OPPOSITE, REPRODUCES

LOWER = {"says": "x falls", "metric": "x", "lower": "a", "higher": "b"}
ABOVE = {"says": "x is large", "metric": "x", "cell": "a", "above": 1.0}
TREND = {"says": "x rises", "metric": "x", "increasing": ["a", "b", "c"]}
PAIRED = {"says": "x < y", "cell": "a", "lower_metric": "x", "higher_metric": "y"}


def judged(claim, **cells):
    values = {cell: of if isinstance(of, dict) else {"x": of} for cell, of in cells.items()}
    (verdict,) = claims.verdicts([claim], values)
    return verdict


def test_two_cells_are_compared_seed_by_seed():
    a, b = np.array([1.0, 5.2, 9.9]), np.array([2.0, 6.6, 11.2])
    gained = b - a
    error = gained.std(ddof=1) / math.sqrt(3)
    half = stats.t.ppf(0.975, 2) * error
    verdict = judged(LOWER, a=a.tolist(), b=b.tolist())
    assert verdict.verdict == REPRODUCES  # by cells alone the spread hides it
    assert verdict.p == pytest.approx(stats.t.sf(gained.mean() / error, 2))
    assert (verdict.difference, verdict.low, verdict.high) == pytest.approx(
        (gained.mean(), gained.mean() - half, gained.mean() + half)
    )
    assert verdict.compared == {"a": a.tolist(), "b": b.tolist()}


def test_a_trend_is_a_ranking_within_each_seed():
    """Page's L of 4 seeds, written out: every permutation of ranks is as likely without a trend."""
    rows = np.array([[1.0, 1.1, 1.2], [7.0, 7.5, 7.2], [3.0, 3.1, 3.9], [5.0, 5.2, 5.4]])
    ranks = rows.argsort(1).argsort(1) + 1
    found = (ranks * [1, 2, 3]).sum()
    one = [np.dot([1, 2, 3], order) for order in itertools.permutations([1, 2, 3])]
    all_of_them = [sum(chosen) for chosen in itertools.product(one, repeat=4)]
    verdict = judged(TREND, **dict(zip("abc", rows.T.tolist(), strict=True)))
    assert verdict.p == pytest.approx(np.mean([each >= found for each in all_of_them]))
    assert verdict.difference == pytest.approx((1 + 1 / 3 + 1 + 1) / 4)


@pytest.mark.parametrize(
    ("claim", "for_it", "against"),
    [
        (LOWER, {"a": [1, 1.1, 0.9], "b": [2, 2.2, 1.9]}, {"a": [2, 2.2, 1.9], "b": [1, 1.1, 0.9]}),
        (ABOVE, {"a": [2, 2.1, 1.9]}, {"a": [0.2, 0.1, 0.3]}),
        ({**ABOVE, "above": None} | {"below": 1.0}, {"a": [0.2, 0.1, 0.3]}, {"a": [2, 2.1, 1.9]}),
        (
            TREND,
            {"a": [1, 1.1, 0.9], "b": [2, 2.1, 1.9], "c": [3, 3.1, 2.9]},
            {"a": [3, 3.1, 2.9], "b": [2, 2.1, 1.9], "c": [1, 1.1, 0.9]},
        ),
        (
            PAIRED,
            {"a": {"x": [1, 5, 9], "y": [1.5, 5.6, 9.4]}},
            {"a": {"y": [1, 5, 9], "x": [1.5, 5.6, 9.4]}},
        ),
    ],
    ids=["two cells", "above", "below", "trend", "paired"],
)
def test_each_kind_says_all_three(claim, for_it, against):
    claim = {key: value for key, value in claim.items() if value is not None}
    assert judged(claim, **for_it).verdict == REPRODUCES
    assert judged(claim, **for_it).difference > 0
    assert judged(claim, **against).verdict == OPPOSITE
    assert judged(claim, **against).difference < 0
    same = {cell: {"x": [0.5, 1, 1.5], "y": [0.6, 0.9, 1.5]} for cell in for_it}
    unclear = judged(claim, **same)
    assert unclear.verdict == NOT_SHOWN
    assert 0.05 < unclear.p <= 0.5
    assert claims.kind_of(claim) in KINDS.values()


def test_equivalence_is_two_one_sided_tests():
    same = {"says": "the same", "metric": "x", "first": "a", "second": "b", "within": 0.1}
    a = [1.0, 5.0, 9.0, 3.0]
    for shift, spread, expected in (
        (0.0, 0.01, REPRODUCES),
        (0.05, 0.01, REPRODUCES),
        (-0.05, 0.01, REPRODUCES),
        (0.5, 0.01, OPPOSITE),
        (-0.5, 0.01, OPPOSITE),
        (0.05, 0.2, NOT_SHOWN),
    ):
        off = np.array([1.0, -1.0, 0.5, -0.5]) * spread + shift
        b = (np.array(a) + off).tolist()
        verdict = judged(same, a=a, b=b)
        error = off.std(ddof=1) / 2
        p = max(
            stats.t.sf((off.mean() + 0.1) / error, 3), stats.t.cdf((off.mean() - 0.1) / error, 3)
        )
        assert verdict.verdict == expected
        assert verdict.p == pytest.approx(min(p, 1 - p))
        assert verdict.low <= off.mean() <= verdict.high


def test_values_without_spread_are_decided_by_their_sign():
    assert judged(LOWER, a=[0, 0, 0], b=[0.5, 0.5, 0.5]).verdict == REPRODUCES
    assert judged(LOWER, a=[0.5] * 3, b=[0] * 3).verdict == OPPOSITE
    assert judged(LOWER, a=[0] * 3, b=[0] * 3).verdict == NOT_SHOWN
    assert judged(ABOVE, a=[1, 1, 1]).verdict == NOT_SHOWN


def test_runs_that_diverged_are_left_out_and_too_few_are_not_measured():
    left = judged(LOWER, a=[1, 1.1, 0.9, None, 1], b=[2, None, 2.1, 1.9, 1.8])
    assert left.verdict == REPRODUCES
    assert left.difference == pytest.approx(1.0)
    verdict = judged(LOWER, a=[1, None, 0.9], b=[2, 2.1, 1.9])
    assert verdict.verdict == NOT_MEASURED
    assert (verdict.p, verdict.difference) == (None, None)
    # A pair needs both.
    lacking = {"a": {"x": [1, None, 3, 4], "y": [2, 3, None, 5]}}
    assert judged(PAIRED, **lacking).verdict == NOT_MEASURED


def test_claims_are_corrected_together():
    """By the definition of Benjamini and Hochberg: the k-th smallest of m, times m / k."""
    values = {"a": {"x": [1.0, 1.3, 0.9]}}
    shifts = (0.1, 0.28, 0.5, 2.0)
    several = []
    for number, shift in enumerate(shifts):
        values[f"b{number}"] = {"x": [1.0 + shift, 1.3 + shift, 0.7 + shift]}
        several.append({**LOWER, "higher": f"b{number}"})
    found = claims.verdicts(several, values)
    raw = [claims.verdicts([claim], values)[0].p for claim in several]
    assert [verdict.p for verdict in found] == raw
    order = np.argsort(raw)
    expected, least = {}, 1.0
    for rank in range(len(raw), 0, -1):
        least = min(least, raw[order[rank - 1]] * len(raw) / rank)
        expected[order[rank - 1]] = least
    assert [v.corrected for v in found] == pytest.approx([expected[i] for i in range(len(raw))])
    assert any(v.p < 0.05 <= v.corrected for v in found)


def test_chance_does_not_reproduce():
    random = np.random.default_rng(1)
    drawn = {
        f"{side}{i}": {"x": random.standard_normal(3).tolist()} for side in "ab" for i in range(60)
    }
    several = [{**LOWER, "lower": f"a{i}", "higher": f"b{i}"} for i in range(60)]
    found = claims.verdicts(several, drawn)
    assert {verdict.verdict for verdict in found} == {NOT_SHOWN}
    assert 1 <= sum(verdict.p < 0.05 for verdict in found) <= 12  # uncorrected; 6 are expected


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({**LOWER, "lower": "aa"}, "cell 'aa' is unknown"),
        ({**LOWER, "metric": "y"}, "metric 'y' is unknown"),
        ({**LOWER, "metric": "loss@25%"}, "curve 'loss' is unknown: choose imbalance"),
        ({**LOWER, "metric": "imbalance@101%"}, "beyond the last step"),
        ({**TREND, "increasing": ["a", "b"]}, "compares 2 cells: use 3"),
        ({**LOWER, "above": 1}, "has the keys above, higher, lower, metric, says"),
        ({"says": "x", "metric": "x"}, "has the keys metric, says"),
        ({**LOWER, "says": 3}, "has the keys"),
    ],
)
def test_a_wrong_claim_is_refused_before_anything_runs(claim, message):
    found = list(claims.problems([LOWER, claim], ["a", "b", "c"], ["x"], ["imbalance"]))
    assert len(found) == 1
    assert found[0].startswith("claim 2")
    assert message in found[0]
