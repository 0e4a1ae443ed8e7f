"""Head statistics over the microbatches of a step. Over ranks: tests/distributed."""

import pytest
import torch

from megasink.balance.gate_sums import HeadSums
from tests.distributed.layout import SINGLE

ROUTED = torch.tensor([True, True])


@pytest.fixture(scope="module", autouse=True)
def one_process():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def ignore(importance_H, gradient_H):
    """What a layer does that shares no heads and has no balance loss."""


def record(sums, layer, importance, tokens, receiver=ignore):
    gate_sum_h = torch.tensor(importance) * tokens
    sums.record(layer, 0, gate_sum_h, tokens, ROUTED, receiver)


def finish(sums, coeff=1.0, scope="global"):
    sums.start_reduction()
    return sums.finish_step(coeff, scope)


# mean 0.3, population deviation 0.2; the global scope has the loss of the importance, summed over
# two layers of two heads
@pytest.mark.parametrize(
    ("scope", "loss"),
    [("microbatch", 0.5 * ((1 + 3) / 2 + (2 + 3) / 2)), ("global", 0.5 * 2 * 2 * 4 / 9)],
)
def test_importance_is_weighted_by_tokens_and_the_loss_by_microbatch(scope, loss):
    sums = HeadSums(layers=2, heads=2)
    for layer in (0, 1):
        record(sums, layer, [0.2, 0.4], 10)
        sums.record_loss(layer, 0, torch.tensor(1.0 + layer))
        record(sums, layer, [0.6, 0.0], 30)
        sums.record_loss(layer, 0, torch.tensor(3.0))
    statistics = finish(sums, 0.5, scope)
    torch.testing.assert_close(statistics.importance_LH, torch.tensor([[0.5, 0.1]] * 2))
    assert float(statistics.imbalance) == pytest.approx(2 / 3, abs=1e-6)
    assert float(statistics.balance_loss) == pytest.approx(loss, abs=1e-6)


def test_a_step_starts_from_nothing():
    sums = HeadSums(layers=1, heads=2)
    for value in (0.9, 0.3):
        record(sums, 0, [value, value], 8)
        found_LH = finish(sums).importance_LH
        torch.testing.assert_close(found_LH, torch.tensor([[value, value]]))


def test_a_pass_that_is_run_again_is_counted_once():
    received, sums = [], HeadSums(layers=1, heads=2)

    def receive(importance_H, gradient_H):
        received.append(importance_H)

    for value in (0.9, 0.3):
        record(sums, 0, [value, value], 8, receive)
        sums.start_reduction()
    sums.finish_step(1.0, "global")
    torch.testing.assert_close(received, [torch.tensor([0.3, 0.3])])


def test_a_layer_without_a_record_is_nan_and_no_zero():
    sums = HeadSums(layers=2, heads=2)
    record(sums, 1, [0.5, 0.5], 8)
    statistics = finish(sums)
    assert statistics.importance_LH[0].isnan().all()
    assert statistics.importance_LH[1].tolist() == [0.5, 0.5]
    assert float(statistics.balance_loss) == 0.0


def test_sums_over_many_microbatches_keep_their_digits():
    value_H, sums = torch.tensor([0.1, 0.7]), HeadSums(layers=1, heads=2)
    for _ in range(3000):
        sums.record(0, 0, value_H.double() * 4097, 4097, ROUTED, ignore)
    assert float((finish(sums).importance_LH[0] / value_H - 1).abs().max()) < 1e-7


def test_records_hold_no_graph():
    sums = HeadSums(layers=1, heads=2)
    gate_sum_h = torch.tensor([0.5, 0.25], requires_grad=True) * 1
    sums.record(0, 0, gate_sum_h, 1, ROUTED, ignore)
    sums.record_loss(0, 0, gate_sum_h.sum())
    assert not sums._table.requires_grad


def test_a_step_without_records(pool):
    """Its importance is unknown and not 0."""
    (found,) = pool.run("tests.balance.two_models_tasks:nothing_recorded", SINGLE)
    assert found == {"nan": True, "balance_loss": 0.0}


def test_layers_with_a_gap_between_them_and_other_counts():
    """Chunks of a virtual pipeline stage, and a microbatch that one of them has not seen."""
    sums = HeadSums(layers=6, heads=2)
    for layer in (0, 1, 3, 4):
        record(sums, layer, [0.2, 0.4], 10)
    for layer in (0, 1, 3):
        record(sums, layer, [0.6, 0.0], 30)
    found_LH = finish(sums).importance_LH
    both, one, none = [0.5, 0.1], [0.2, 0.4], [float("nan")] * 2
    expected_LH = torch.tensor([both, both, none, both, one, none])
    torch.testing.assert_close(found_LH, expected_LH, equal_nan=True)
