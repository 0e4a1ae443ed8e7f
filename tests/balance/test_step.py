"""The loss from step to step: what counts once, and what a step that is run again sees."""

from types import SimpleNamespace

import pytest
import torch

from megasink.balance.layer_loss import LayerBalance
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
def installed(step):
    """The same, in a loop that calls no more than `reduce`."""
    step.installed = True
    return step


@pytest.fixture
def layer(step):
    return Layer(OPTIONS, step, 0, 2, ONE_RANK)


def run(step, layer, gate_sum_H, number=None):
    """The microbatch of a step, up to its reduction."""
    if number is not None or not step.installed:
        step.begin(step.number + 1 if number is None else number)
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


def test_gates_without_a_step_are_refused(step, layer):
    with pytest.raises(RuntimeError, match=r"no step has begun, .* install\(\)"):
        layer.record(FIRST_H, 8)
    with pytest.raises(RuntimeError, match=r"no step has begun"):
        step.commit()


def test_a_step_that_was_not_committed_is_refused(step, layer):
    run(step, layer, FIRST_H)
    for call in (lambda: layer.record(FIRST_H, 8), lambda: step.begin(1)):
        with pytest.raises(RuntimeError, match=r"step 0 was not committed, .* commit\(\)"):
            call()


def test_a_host_that_does_not_number_steps_is_asked_whether_one_runs_again(installed, layer):
    installed.runs_again = lambda: True
    run(installed, layer, FIRST_H)
    run(installed, layer, SECOND_H)
    assert installed.number == 0
    assert installed.commit().importance_LH.tolist() == [[0.5, 0.5]]


def test_a_saved_state_holds_a_reduced_step_but_not_one_that_runs_again(installed, layer):
    run(installed, layer, FIRST_H)
    installed.runs_again = lambda: True  # saved to be run again elsewhere
    assert not layer.state_dict()["coefficients"].any()
    installed.runs_again = lambda: False
    assert layer.state_dict()["coefficients"].tolist() == [-3.0, 1.0]
    assert installed.phase is Phase.BETWEEN


def test_an_installed_step_is_committed_by_the_next_gates_and_by_its_reader(installed, layer):
    """Whether the optimizer steps or skips: also in the first step."""
    for number in range(3):
        run(installed, layer, FIRST_H)
        assert installed.number == number
        assert layer.coefficients.any() == (number > 0)
    assert (installed.last_number, int(layer.steps)) == (2, 3)


def test_a_skipped_step_whose_gates_are_nan_leaves_no_nan(installed, layer):
    for gates_H in (FIRST_H, FIRST_H * torch.nan, FIRST_H):
        run(installed, layer, gates_H)
    assert layer.coefficients.tolist() == [0.0, 0.0]  # one step without the loss
    assert installed.last is not None
    assert layer.coefficients.tolist() == [-3.0, 1.0]


def test_the_share_and_the_observation_of_a_step_last_until_the_next(installed, layer):
    installed.begin(0, observe=True, share=0.25)
    layer.record(FIRST_H, 8)
    assert (installed.heads.observes, installed.factors.share) == (True, 0.25)
    installed.reduce()
    installed.commit()
    run(installed, layer, FIRST_H)  # of a host that says nothing
    found = (installed.number, installed.heads.observes, installed.factors.share)
    assert found == (1, True, 0.25)


def test_a_step_that_begins_again_counts_once(step, layer):
    """After an exception that followed the backward passes."""
    step.begin(0)
    layer.record(FIRST_H, 8)
    run(step, layer, SECOND_H, number=0)
    assert step.commit().importance_LH.tolist() == [[0.5, 0.5]]
    assert int(layer.steps) == 1


@pytest.mark.parametrize("number", [None, 5])
@pytest.mark.parametrize("reduced", [False, True])
def test_what_an_exception_broke_does_not_count(installed, layer, number, reduced):
    run(installed, layer, FIRST_H, number=None if number is None else number - 1)
    installed.commit()
    before_H, number_before = layer.coefficients, installed.number
    if number is not None:
        installed.begin(number)
    layer.record(FIRST_H, 8)
    layer.record(FIRST_H, 8)
    if reduced:
        installed.reduce()
    installed.discard()
    assert (installed.phase, installed.number) == (Phase.BETWEEN, number_before)
    assert layer.coefficients is before_H
    run(installed, layer, SECOND_H, number=number)
    assert installed.number == number_before + 1
    assert installed.commit().importance_LH.tolist() == [[0.5, 0.5]]
    assert int(layer.steps) == 2


def test_a_committed_step_is_not_discarded(step, layer):
    run(step, layer, FIRST_H)
    last = step.commit()
    step.discard()
    assert (step.number, step.last) == (0, last)
    assert layer.coefficients.tolist() == [-3.0, 1.0]


def test_a_step_that_is_committed_may_be_committed_again(installed, layer):
    for number in range(2):
        run(installed, layer, FIRST_H, number=number)
        assert installed.commit() is installed.commit() is installed.last
        assert (installed.last_number, int(layer.steps)) == (number, number + 1)


def test_a_second_reduction_is_refused_and_does_not_count(step, layer):
    run(step, layer, FIRST_H)
    with pytest.raises(RuntimeError, match=r"called twice in step 0: .*install\(\)"):
        step.reduce()
    assert step.commit().importance_LH.tolist() == [[0.25, 0.75]]


def test_a_layer_that_counts_nothing_beside_others_is_named(step, layer):
    """One in eval(): its row would be NaN, and its share of the gradient missing."""
    step.built.add(3)
    with pytest.raises(
        RuntimeError, match=r"in step 0 layers \[0\] counted gates, but layers \[3\] did not"
    ):
        run(step, layer, FIRST_H)


def test_attention_of_another_kind_among_ours_is_counted(step, layer):
    step.expected[1] = 2
    with pytest.raises(RuntimeError, match=r"^only layers \[0\] of 2 attention layers count"):
        run(step, layer, FIRST_H)


def test_a_second_backward_pass_through_one_forward_pass_does_not_count(step, layer):
    gate_sum_H, coefficients_H = FIRST_H.clone().requires_grad_(), torch.tensor([-3.0, 1.0])
    layer.coefficients = coefficients_H
    step.begin(0)
    out = layer.attach(torch.zeros(1, requires_grad=True), gate_sum_H, 8).sum()
    out.backward(retain_graph=True)
    with pytest.warns(UserWarning, match="layer 0: a second backward pass"):
        out.backward()
    assert torch.equal(gate_sum_H.grad, coefficients_H / 8)


def test_layers_that_count_nothing_are_named(step, layer):
    """A model in eval() would train with a loss of 0."""
    step.begin(0)
    with pytest.raises(RuntimeError, match=r"no layer has counted a gate, .* train\(\) mode"):
        step.reduce()


def test_a_forward_pass_without_a_backward_pass_does_not_count(installed, layer):
    """Of an evaluation, or of a step that an exception has ended."""

    def forward(gate_sum_H):
        out = layer.attach(torch.zeros(1, requires_grad=True), gate_sum_H.requires_grad_(), 8)
        return out.sum()

    forward(SECOND_H.clone())
    forward(FIRST_H.clone()).backward()
    installed.reduce()
    assert installed.commit().importance_LH.tolist() == [[0.25, 0.75]]


def test_a_frozen_layer_has_no_backward_pass_to_wait_for(installed, layer):
    layer.attach(torch.zeros(1), FIRST_H, 8)
    installed.reduce()
    assert installed.commit().importance_LH.tolist() == [[0.25, 0.75]]
