"""GroupStepAdam is torch's Adam and AdamW with the step kept per group."""

import pytest
import torch

from megasink.upstream.adam import GroupStepAdam

OPTIONS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}


def parameters(dtype=torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (4,), (2, 2, 2), (1,)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def gradients(step: int, like: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in like]


def groups(params: list[torch.nn.Parameter]) -> list[dict]:
    """Two groups that differ in every option."""
    return [{"params": params[:2]}, {"params": params[2:], "lr": 1e-2, "weight_decay": 0.0}]


def run(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        for p, gradient in zip(params, gradients(step, params), strict=True):
            # The last parameter gets a gradient in every second step only.
            p.grad = gradient if p is not params[-1] or step % 2 else None
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("mode", "reference"), [(True, "AdamW"), (False, "Adam")])
def test_equals_torch(mode, reference, dtype):
    found, wanted = parameters(dtype)[:3], parameters(dtype)[:3]
    mine = GroupStepAdam(groups(found), adam_w_mode=mode, **OPTIONS)
    theirs = getattr(torch.optim, reference)(groups(wanted), **OPTIONS)
    before = [p.detach().clone() for p in found]
    for optimizer, params in ((mine, found), (theirs, wanted)):
        for step in range(6):
            for p, gradient in zip(params, gradients(step, params), strict=True):
                p.grad = gradient
            optimizer.step()
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 0}
    )
    for new, good, old in zip(found, wanted, before, strict=True):
        torch.testing.assert_close(new, good, **tolerance)
        assert (new - old).abs().mean() > 1e-3


def test_a_saved_state_goes_on_to_the_bit():
    straight, resumed = parameters(), parameters()
    optimizer = GroupStepAdam(groups(straight), **OPTIONS)
    run(optimizer, straight, range(6))
    first = GroupStepAdam(groups(resumed), **OPTIONS)
    run(first, resumed, range(3))
    second = GroupStepAdam(groups(resumed), **OPTIONS)
    second.load_state_dict(first.state_dict())
    run(second, resumed, range(3, 6))
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)
    assert [group["step"] for group in second.param_groups] == [6, 6]


def test_parameters_without_a_gradient_stay():
    params = parameters()
    before = params[-1].detach().clone()
    run(GroupStepAdam(groups(params), **OPTIONS), params, range(0, 1))
    assert torch.equal(params[-1], before)
    assert not torch.equal(params[0], parameters()[0])


def test_a_group_without_parameters_counts_its_steps():
    """As on a data-parallel rank that owns none of the group: the number goes into checkpoints."""
    params = parameters()
    optimizer = GroupStepAdam([{"params": params}, {"params": []}], **OPTIONS)
    run(optimizer, params, range(2))
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]


def test_cuda_graphs_are_refused():
    with pytest.raises(ValueError, match="CUDA graph"):
        GroupStepAdam(parameters(), capturable=True)
