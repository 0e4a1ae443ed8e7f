"""The head-balance loss under DDP, FSDP1 and FSDP2 equals one process, in float64."""

import pytest
import torch

from tests.distributed.layout import Layout
from tests.transformers.sharded_tasks import results

WRAPPERS = ("ddp", "fsdp1", "fsdp2")
# Padding on one rank, two microbatches per rank and step; attached before and after wrapping.
CASES = [
    *({"wrapper": w, "scope": s} for w in WRAPPERS for s in ("global", "microbatch")),
    *({"wrapper": w, "scope": "data-parallel"} for w in WRAPPERS),
    *({"wrapper": w, "scope": "global", "late": True} for w in ("fsdp1", "fsdp2")),
    *(
        {"wrapper": "fsdp2", "scope": "global", "checkpointing": c}
        for c in ("reentrant", "not reentrant")
    ),
]


@pytest.fixture(scope="module")
def found(pool):
    """The gradients and importance of every case on two ranks."""
    task = "tests.transformers.sharded_tasks:on_ranks"
    first, second = pool.run(task, Layout(dp=2), cases=CASES)
    for (own, own_LH), (other, other_LH) in zip(first, second, strict=True):
        assert all((own[name] == other[name]).all() for name in own)
        assert (own_LH == other_LH).all()
    tensor = torch.from_numpy
    return [({n: tensor(g) for n, g in own.items()}, tensor(own_LH)) for own, own_LH in first]


def error(found, expected):
    """The largest difference, of the largest entry of each gradient."""
    assert found.keys() == expected.keys()
    sizes = {name: float(value.abs().max()) for name, value in expected.items()}
    assert sum(size > 0 for size in sizes.values()) > 10
    return max(
        float((found[name] - value).abs().max()) / sizes[name]
        for name, value in expected.items()
        if sizes[name]
    )


@pytest.mark.parametrize("scope", ["global", "microbatch"])
def test_gradients_and_importance_equal_one_process(found, scope):
    """Within the rounding of sums in another order."""
    gradients, importance_LH = results("", scope, 0, 1)
    compared = 0
    for case, (own, own_LH) in zip(CASES, found, strict=True):
        if case["scope"] == scope:
            assert error(own, gradients) < 5e-15, case
            torch.testing.assert_close(own_LH, importance_LH, rtol=1e-7, atol=0)
            compared += 1
    assert compared >= 3


def test_the_scopes_differ_so_the_loss_is_in_the_gradients(found):
    """And data-parallel, whose tokens one process has in no microbatch, is DDP's in each."""
    by_scope = {
        scope: [own for case, (own, _) in zip(CASES, found, strict=True) if case["scope"] == scope]
        for scope in ("global", "microbatch", "data-parallel")
    }
    ddp, *others = by_scope["data-parallel"]
    assert len(others) == 2
    assert max(error(other, ddp) for other in others) < 5e-15
    assert error(by_scope["microbatch"][0], by_scope["global"][0]) > 1e-3
    assert error(ddp, by_scope["microbatch"][0]) > 1e-3
