"""The number of shared heads, from made-up importance."""

import math

import numpy as np
import pytest
import torch

from megasink.balance.shared_heads import choose_shared_heads
from megasink.errors import UserError


def _layers(high, low, layers=6, heads=16, shared=3, seed=0):
    """Layers of `shared` heads around `high`, at random places, the others around `low`."""
    random = torch.Generator().manual_seed(seed)
    rows, places = [], []
    for _ in range(layers):
        row = low + 0.1 * (torch.rand(heads, generator=random, dtype=torch.float64) - 0.5)
        chosen = torch.randperm(heads, generator=random)[:shared]
        row[chosen] += high - low
        rows.append(row)
        places.append(sorted(chosen.tolist()))
    return torch.stack(rows), places


@pytest.mark.parametrize("shared", [1, 2, 3, 8, 14])
def test_the_high_group_is_found(shared):
    importance_LH, places = _layers(high=0.9, low=0.2, shared=shared)
    chosen = choose_shared_heads(importance_LH)
    assert (chosen.m, chosen.best) == (shared, shared)
    assert [row.nonzero().flatten().tolist() for row in chosen.pinned_LH] == places
    lines = chosen.describe().splitlines()
    assert lines[0].startswith(f"m = {shared} shared heads (Eq. 8): {shared} high and")
    named = " ".join(str(head) for head in places[2])
    assert lines[3].startswith(f"layer 2: heads {named} (importance 0.")
    assert len(lines) == 1 + len(places)


def test_explained_is_the_part_of_the_loss_between_the_groups():
    """Written out: Eq. 7 of the group means against Eq. 7 of the heads."""
    importance_LH, _ = _layers(high=0.7, low=0.4, shared=4)
    chosen = choose_shared_heads(importance_LH)
    between = total = 0.0
    for row in importance_LH.numpy():
        high = np.sort(row)[::-1][: chosen.m]
        low = np.sort(row)[::-1][chosen.m :]
        groups = np.concatenate([np.full(len(high), high.mean()), np.full(len(low), low.mean())])
        between += len(row) * groups.var() / groups.mean() ** 2
        total += len(row) * row.var() / row.mean() ** 2
    assert chosen.explained == pytest.approx(between / total, rel=1e-12)
    assert chosen.explained > chosen.evenly


def test_layers_count_relative_to_their_mean_as_in_the_loss():
    strong, _ = _layers(high=0.9, low=0.2, shared=3, layers=3)
    weak = strong[:1] * 1e-3  # the same shape on a smaller scale counts as much
    both = choose_shared_heads(torch.cat([strong, weak]))
    alone = choose_shared_heads(torch.cat([strong, strong[:1]]))
    assert both.explained == pytest.approx(alone.explained, rel=1e-9)


@pytest.mark.parametrize("heads", [3, 4, 8, 15, 32])
def test_evenly_spaced_heads_are_not_two_groups(heads):
    importance_LH = torch.linspace(0.1, 0.9, heads, dtype=torch.float64).repeat(4, 1)
    chosen = choose_shared_heads(importance_LH)
    assert chosen.m == 0
    assert chosen.best > 0
    assert not chosen.pinned_LH.any()
    if heads % 2 == 0 and heads > 2:
        assert chosen.explained == pytest.approx(0.75 * heads**2 / (heads**2 - 1))
        assert f"evenly spaced heads would explain {chosen.evenly:.0%}" in chosen.describe()


def test_a_spread_around_one_value_is_not_two_groups():
    random = torch.Generator().manual_seed(1)
    spread_LH = 0.5 + 0.1 * torch.randn(24, 16, generator=random, dtype=torch.float64)
    chosen = choose_shared_heads(spread_LH.clamp(0, 1))
    assert chosen.m == 0
    assert 0.5 < chosen.explained < chosen.evenly


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_equal_heads(value):
    chosen = choose_shared_heads(torch.full((3, 5), value, dtype=torch.float64))
    assert (chosen.m, chosen.best, chosen.explained) == (0, 0, 0.0)
    assert "all heads of a layer are equally important" in chosen.describe()


@pytest.mark.parametrize("heads", [1, 2])
def test_too_few_heads(heads):
    chosen = choose_shared_heads(torch.tensor([[0.9, 0.1][:heads]] * 3))
    assert (chosen.m, chosen.best) == (0, 0)
    assert f"with {heads} head{'s' * (heads != 1)} per layer" in chosen.describe()


def test_at_least_two_heads_stay_to_be_balanced():
    """One low head is the clearest split, but the CV of one head is 0."""
    importance_LH = torch.tensor([[0.9, 0.9, 0.9, 0.9, 0.1]], dtype=torch.float64)
    chosen = choose_shared_heads(importance_LH)
    assert chosen.best <= 3
    assert chosen.m == 0


def test_layers_without_attention_are_skipped():
    importance_LH, places = _layers(high=0.9, low=0.2, layers=2)
    none_H = torch.full((16,), math.nan, dtype=torch.float64)
    hybrid_LH = torch.stack([none_H, importance_LH[0], none_H, importance_LH[1]])
    chosen = choose_shared_heads(hybrid_LH)
    assert chosen.m == 3
    assert not chosen.pinned_LH[[0, 2]].any()
    assert chosen.explained == choose_shared_heads(importance_LH).explained
    lines = chosen.describe().splitlines()
    assert "of 2 layers" in lines[0]
    assert [line.split(":")[0] for line in lines[1:]] == ["layer 1", "layer 3"]
    assert " ".join(str(head) for head in places[1]) in lines[2]


def test_ties_share_the_lower_index_as_training_does():
    chosen = choose_shared_heads(torch.tensor([[0.1, 0.9, 0.1, 0.9, 0.1, 0.1]]))
    assert chosen.m == 2
    assert chosen.pinned_LH.tolist() == [[False, True, False, True, False, False]]


def test_numpy_and_other_dtypes():
    importance_LH, _ = _layers(high=0.9, low=0.2)
    expected = choose_shared_heads(importance_LH)
    assert choose_shared_heads(importance_LH.numpy()).explained == expected.explained
    assert choose_shared_heads(importance_LH.float()).m == expected.m


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        ([0.1, 0.2], "must be [layers, heads], got [2]"),
        ([[]], "must be [layers, heads], got [1, 0]"),
        ([[0.1, math.nan]], "layer 0 lacks the importance of some of its heads"),
        ([[math.nan, math.nan]], "no layer has head importance"),
        ([[0.5, 1.5]], "must be in [0, 1]"),
        ([[0.5, math.inf]], "must be in [0, 1]"),
        ([[-0.1, 0.5]], "must be in [0, 1]"),
    ],
)
def test_what_is_no_importance(importance, message):
    with pytest.raises(UserError) as raised:
        choose_shared_heads(torch.tensor(importance))
    assert message in str(raised.value)
