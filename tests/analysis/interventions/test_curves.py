"""P3.15 and P3.16 on curves made by hand."""

import math

import numpy as np
import pytest

from megasink.analysis.ablate.quality_curves import (
    kept_level,
    normalized_auc,
    ranks,
    removable,
)

NAN = math.nan


@pytest.mark.parametrize(
    ("x", "y", "percent", "never_left"),
    [
        # Falls from 60 to 58 between 0 and 10: meets 59 halfway.
        ([0, 10, 20], [60, 58, 50], 5.0, False),
        # Crosses twice downward, once upward: the last one counts, at 20 + 10 * 1 / 4.
        ([0, 10, 20, 30], [60, 58, 60, 56], 22.5, False),
        # The last crossing is upward: at 10 + 10 * 1 / 2.
        ([0, 10, 20], [60, 58, 60], 15.0, False),
        # Never falls that far.
        ([0, 10, 20], [60, 59.5, 60], 0.0, True),
        # Is never that good.
        ([0, 10, 20], [58, 57, 50], 0.0, False),
        # A point on the level counts, also the last or the first one.
        ([0, 10, 20], [60, 60, 59], 20.0, False),
        ([0, 10, 20], [59, 58, 50], 0.0, False),
        ([0, 10, 20, 30], [60, 59, 60, 59.5], 10.0, False),
        # In any order of points.
        ([20, 0, 10], [50, 60, 58], 5.0, False),
        # Segments next to NaN meet nothing, wherever the curve comes back.
        ([0, 10, 20, 30], [60, NAN, 58, 50], 0.0, False),
        ([0, 10, 20, 30, 40], [60, 58, NAN, 60, 58], 35.0, False),
        ([0], [60], 0.0, True),
        ([0], [59], 0.0, False),
        ([5], [59], 5.0, False),
    ],
)
def test_removable_heads(x, y, percent, never_left):
    found = removable(x, y, kept_level(60.0))
    assert found.percent == pytest.approx(percent, abs=1e-12)
    assert found.never_left is never_left
    # A loss is the same curve upside down; shifted by 100, so that 59 becomes 41.
    mirrored = removable(x, [100 - value for value in y], 41.0, higher_is_better=False)
    assert mirrored == found


def published(xs, ys, baseline):
    """The loop of the released notebook, P3.15."""
    last = xs[0] if ys[0] == baseline else None
    for x1, x2, y1, y2 in zip(xs, xs[1:], ys, ys[1:], strict=False):
        if (y1 - baseline) * (y2 - baseline) < 0:
            last = x1 + (baseline - y1) * (x2 - x1) / (y2 - y1)
        if y2 == baseline:
            last = x2
    return 0 if last is None else last


def test_random_curves_as_the_released_loop():
    random = np.random.default_rng(0)
    met = 0
    for trial in range(300):
        x = np.sort(random.uniform(0, 30, 7))
        # Whole numbers: some lie on the level, and every third curve stays above it.
        y = np.round(random.uniform(57, 61, 7)) + 3 * (trial % 3 == 0)
        expected = published(list(x), list(y), 59.0)
        assert removable(x, y, 59.0).percent == pytest.approx(expected, abs=1e-12)
        met += expected > 0
    assert 150 < met < 250


def test_curves_of_the_paper():
    """Llama-3.2-3B on MMLU, as printed by the released notebook: 8.34 and 52.09 of Table 2."""
    x = [0.0, 5.499018908312523, 11.738878837300172, 17.845218983062363, 23.508369009394695]
    x += [28.80920527326164, 32.301838591305234]
    y = [56.152969662441244, 55.533399800598204, 54.807007548782224, 53.204671699188154]
    y += [51.11807434838342, 46.232730380287705, 38.570004272895595]
    level = kept_level(56.202820111095285)
    assert round(removable(x, y, level).percent, 2) == 8.34
    assert round(normalized_auc(x, y), 2) == 52.09


def test_a_loss_may_rise_by_one_percent():
    assert kept_level(2.0, higher_is_better=False) == pytest.approx(2.02)
    found = removable(
        [0, 10], [2.0, 2.04], kept_level(2.0, higher_is_better=False), higher_is_better=False
    )
    assert found.percent == pytest.approx(5.0)


def test_normalized_auc():
    assert normalized_auc([0, 10, 30], [60, 50, 20]) == pytest.approx((550 + 700) / 30)
    assert normalized_auc([30, 0, 10], [20, 60, 50]) == pytest.approx((550 + 700) / 30)
    # The span is that of the curve, wherever it begins.
    assert normalized_auc([5, 15], [60, 40]) == 50
    assert normalized_auc([0, 10, 20], [60, NAN, 50]) == 0
    assert normalized_auc([0, 10], [2, NAN], worst=math.inf) == math.inf
    assert normalized_auc([3, 3], [60, 50]) == 0


def test_ranks():
    aucs = {"random": 40.0, "awft": 52.0, "ahon": 51.0, "broken": 0.0}
    assert ranks(aucs) == {"random": 3, "awft": 1, "ahon": 2, "broken": 4}
    losses = {"random": 4.0, "awft": 3.0, "broken": math.inf}
    assert ranks(losses, higher_is_better=False) == {"random": 2, "awft": 1, "broken": 3}


@pytest.mark.parametrize(("x", "y"), [([], []), ([0, 1], [1]), ([[0]], [[1]])])
def test_what_is_no_curve(x, y):
    with pytest.raises(ValueError, match="give one value per percentage"):
        normalized_auc(x, y)
    with pytest.raises(ValueError, match="give one value per percentage"):
        removable(x, y, 0.0)
