"""Head statistics over the microbatches of a step. Over ranks: tests/distributed."""

import pytest
import torch

from megasink.balance.tracker import HeadTracker
from tests.distributed.layout import SINGLE


class OneRank:
    """A process group of this process alone."""

    def size(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(HeadTracker, "_rows", {})


def finish(layers: int = 2, heads: int = 2):
    return HeadTracker.finish_step(layers, heads, OneRank(), OneRank())


def test_importance_is_weighted_by_tokens_and_the_loss_by_microbatch():
    for layer in (0, 1):
        HeadTracker.record(layer, torch.tensor([0.2, 0.4]), 10, torch.tensor(1.0 + layer))
        HeadTracker.record(layer, torch.tensor([0.6, 0.0]), 30, torch.tensor(3.0))
    statistics = finish()
    torch.testing.assert_close(statistics.importance_LH, torch.tensor([[0.5, 0.1]] * 2))
    # mean 0.3, population deviation 0.2
    torch.testing.assert_close(statistics.imbalance_L, torch.full((2,), 2 / 3))
    assert statistics.imbalance == pytest.approx(2 / 3)
    assert statistics.balance_loss == pytest.approx((1 + 3) / 2 + (2 + 3) / 2)


def test_a_step_starts_from_nothing():
    for value in (0.9, 0.3):
        for layer in (0, 1):
            HeadTracker.record(layer, torch.tensor([value, value]), 8, None)
        statistics = finish()
    torch.testing.assert_close(statistics.importance_LH, torch.full((2, 2), 0.3))
    assert statistics.balance_loss == 0.0


def test_a_layer_without_a_record_is_nan_and_no_zero():
    HeadTracker.record(1, torch.tensor([0.5, 0.5]), 8, None)
    importance_LH = finish().importance_LH
    assert importance_LH[0].isnan().all()
    assert importance_LH[1].tolist() == [0.5, 0.5]


def test_sums_over_many_microbatches_keep_their_digits():
    value = torch.tensor([0.1, 0.7])
    for _ in range(3000):
        HeadTracker.record(0, value, 4097, None)
    torch.testing.assert_close(finish(layers=1).importance_LH[0], value, rtol=1e-7, atol=0.0)


def test_records_hold_no_graph():
    importance_H = torch.tensor([0.5, 0.25], requires_grad=True)
    HeadTracker.record(0, importance_H * 1, 1, importance_H.sum())
    assert not HeadTracker._rows[0].requires_grad


def test_a_step_without_records(pool):
    """Its importance is unknown and not 0."""
    (found,) = pool.run("tests.balance.tasks:finish_without_records", SINGLE)
    assert found == {"nan": True, "balance_loss": 0.0}
