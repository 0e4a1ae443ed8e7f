"""The loss from step to step: what counts once, and what a step that is run again sees."""

from types import SimpleNamespace

import pytest
import torch

from megasink.balance.layer import LayerBalance
from megasink.balance.step import LossStep, Phase

ONE_RANK = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
OPTIONS = SimpleNamespace(
    head_balance_coeff=1.0,
    head_balance_scope="global",
    head_balance_shared_heads=0,
    head_balance_shared_refresh=0,
)
FIRST_H, SECOND_H = torch.tensor([2.0, 6.0]), torch.tensor([4.0, 4.0])  # sums over 8 tokens


class Layer(LayerBalance):
    """A layer whose microbatches count equally."""

    def targets(self):
        return None


@pytest.fixture
def step():
    return LossStep(1, 2, OPTIONS)


@pytest.fixture
def layer(step):
    return Layer(OPTIONS, step, 0, 2, ONE_RANK)


def run(step, layer, gate_sum_H, number=None):
    """The microbatch of a step, up to its reduction."""
    if number is not None:
        step.begin(number)
    layer.record(gate_sum_H, 8)
    step.reduce()


def test_a_step_gives_the_next_one_its_coefficients(step, layer):
    assert not layer.coefficients.any()
    run(step, layer, FIRST_H)
    assert not layer.coefficients.any()  # not before the step ends
    last = step.commit()
    assert last is step.last
    assert last.importance_LH.tolist() == [[0.25, 0.75]]
    # 2 [(Imp - mu) / mu^2 - var / mu^3], mu 1/2, var 1/16
    assert layer.coefficients.tolist() == [-3.0, 1.0]
    assert (step.last_number, int(layer.steps)) == (0, 1)


def test_a_step_that_runs_again_sees_the_same_coefficients_and_counts_once(step, layer):
    run(step, layer, FIRST_H, number=7)
    step.commit()
    before_H = layer.coefficients
    run(step, layer, FIRST_H, number=8)
    run(step, layer, SECOND_H, number=8)
    assert layer.coefficients is before_H
    assert step.commit().importance_LH.tolist() == [[0.5, 0.5]]
    assert int(layer.steps) == 2


def test_a_host_that_does_not_number_steps_is_asked_whether_one_runs_again(step, layer):
    step.runs_again = lambda: True
    run(step, layer, FIRST_H)
    run(step, layer, SECOND_H)
    assert step.number == 0
    assert step.commit().importance_LH.tolist() == [[0.5, 0.5]]


def test_a_saved_state_holds_a_skipped_step_but_not_one_that_runs_again(step, layer):
    step.scales_loss = lambda: True
    run(step, layer, FIRST_H)
    step.runs_again = lambda: True  # saved to be run again elsewhere
    assert not layer.state_dict()["coefficients"].any()
    step.runs_again = lambda: False
    assert layer.state_dict()["coefficients"].tolist() == [-3.0, 1.0]
    assert step.phase is Phase.BETWEEN


def test_once_an_optimizer_has_stepped_a_step_without_one_is_committed_by_what_follows(step, layer):
    run(step, layer, FIRST_H)
    with pytest.raises(RuntimeError, match=r"step 0 was not committed, .* commit\(\)"):
        layer.record(FIRST_H, 8)
    step.optimizer_stepped()
    assert step.last_number == 0
    for number in (1, 2):  # two bad gradients
        run(step, layer, SECOND_H)
        assert step.last_number == number - 1
    assert layer.state_dict()["coefficients"].tolist() == [0.0, 0.0]  # of equal heads
    assert step.last_number == 2


def test_a_skipped_step_whose_gates_are_nan_leaves_no_nan(step, layer):
    run(step, layer, FIRST_H)
    step.optimizer_stepped()
    run(step, layer, FIRST_H * torch.nan)
    run(step, layer, FIRST_H)
    assert layer.coefficients.tolist() == [0.0, 0.0]  # one step without the loss
    step.optimizer_stepped()
    assert layer.coefficients.tolist() == [-3.0, 1.0]


def test_the_share_and_the_observation_of_a_step_last_until_the_next(step, layer):
    step.begin(0, observe=True, share=0.25)
    layer.record(FIRST_H, 8)
    step.begin(0, observe=False, share=1.0)  # another microbatch
    assert (step.heads.observes, step.balance.share) == (True, 0.25)
    step.reduce()
    step.commit()
    run(step, layer, FIRST_H)  # of a host that says nothing
    assert (step.number, step.heads.observes, step.balance.share) == (1, True, 0.25)


def test_the_optimizer_of_another_model_ends_no_step(step, layer):
    step.optimizer_stepped()
    assert step.phase is Phase.BETWEEN
    run(step, layer, FIRST_H)
    step.optimizer_stepped()
    assert step.last_number == 0
    step.optimizer_stepped()  # the second optimizer of a model with two
    assert step.last_number == 0


@pytest.mark.parametrize("number", [None, 5])
@pytest.mark.parametrize("reduced", [False, True])
def test_what_an_exception_broke_does_not_count_beside_its_repetition(step, layer, number, reduced):
    run(step, layer, FIRST_H, number=None if number is None else number - 1)
    step.commit()
    before_H, number_before = layer.coefficients, step.number
    if number is not None:
        step.begin(number)
    layer.record(FIRST_H, 8)
    layer.record(FIRST_H, 8)
    if reduced:
        step.reduce()
    step.discard()
    assert (step.phase, step.number) == (Phase.BETWEEN, number_before)
    assert layer.coefficients is before_H
    run(step, layer, SECOND_H, number=number)
    assert step.number == number_before + 1
    assert step.commit().importance_LH.tolist() == [[0.5, 0.5]]
    assert int(layer.steps) == 2


def test_a_committed_step_is_not_discarded(step, layer):
    run(step, layer, FIRST_H)
    last = step.commit()
    step.discard()
    assert (step.number, step.last) == (0, last)
    assert layer.coefficients.tolist() == [-3.0, 1.0]


def test_a_discarded_step_may_be_given_up(step, layer):
    """And its optimizer may have stepped before the reduction that never came."""
    layer.record(FIRST_H, 8)
    step.optimizer_stepped()
    step.discard()
    run(step, layer, SECOND_H)
    assert step.commit().importance_LH.tolist() == [[0.5, 0.5]]


def test_a_step_that_the_hook_has_committed_may_be_committed_by_its_host_too(step, layer):
    for number in range(2):
        run(step, layer, FIRST_H, number=number)
        step.optimizer_stepped()
        assert step.commit() is step.last
        assert (step.last_number, int(layer.steps)) == (number, number + 1)


@pytest.mark.parametrize("committed", [0, 2])
def test_a_second_reduction_is_refused_and_does_not_count(step, layer, committed):
    for _ in range(committed):
        run(step, layer, FIRST_H)
        step.optimizer_stepped()
    run(step, layer, FIRST_H)
    with pytest.raises(RuntimeError, match=rf"called twice in step {committed}: .*finalize_model"):
        step.reduce()
    assert step.commit().importance_LH.tolist() == [[0.25, 0.75]]


def test_layers_that_count_nothing_are_named(step, layer):
    """A model in eval() would train with a loss of 0."""
    with pytest.raises(RuntimeError, match=r"no layer has counted a gate, .* model\.train\(\)"):
        step.reduce()


def test_a_forward_pass_without_a_backward_pass_is_warned_of_once(step, layer):
    def forward():
        gate_sum_H = FIRST_H.clone().requires_grad_()
        layer.record(gate_sum_H, 8)
        return layer.attach(torch.zeros(1, requires_grad=True), gate_sum_H, 8).sum()

    forward().backward()
    step.reduce()  # without a word
    step.commit()
    step.balance.set_loss_scale(0.5)
    forward()  # of an evaluation, or of a step that an exception has ended
    forward().backward()
    with pytest.warns(UserWarning, match=r"step 1: layers \[0\] counted .*no_grad.*discard\(\)"):
        step.reduce()
    step.commit()
    forward()
    step.reduce()


def test_a_frozen_layer_has_no_backward_pass_to_wait_for(step, layer):
    layer.record(FIRST_H, 8)
    layer.attach(torch.zeros(1), FIRST_H, 8)
    step.reduce()
    assert step.commit().importance_LH.tolist() == [[0.25, 0.75]]
