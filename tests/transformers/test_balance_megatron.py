"""The head-balance loss in transformers equals Megatron's, on the same weights and batches."""

import numpy as np
import pytest

from tests.distributed.layout import SINGLE

TASK = "tests.transformers.balance_megatron_tasks:trained_twice"
# target, masked targets, flags of Megatron, options of HeadBalanceLoss
CASES = [
    (
        "llama",
        True,
        ["--head-balance-coeff", "50", "--head-balance-shared-heads", "1"],
        {"coeff": 50.0, "shared_heads": 1},
    ),
    (
        "granite_swa",
        True,
        ["--head-balance-coeff", "0.5", "--head-balance-scope", "microbatch"],
        {"coeff": 0.5, "scope": "microbatch"},
    ),
    ("qwen3_5_text", False, ["--head-balance-coeff", "0.5"], {"coeff": 0.5}),
]


@pytest.mark.parametrize(("name", "masked", "flags", "options"), CASES, ids=[c[0] for c in CASES])
def test_three_steps_equal_megatrons(pool, name, masked, flags, options):
    (found,) = pool.run(TASK, SINGLE, name=name, masked=masked, flags=flags, **options)
    megatron, ours = found["megatron"], found["transformers"]
    np.testing.assert_allclose(ours["loss"], megatron["loss"], rtol=2e-5)
    np.testing.assert_allclose(ours["balance_loss"], megatron["balance_loss"], rtol=2e-4)
    np.testing.assert_allclose(ours["importance"], megatron["importance"], rtol=0, atol=2e-5)
    assert megatron["balance_loss"][-1] > 1e-2
    for kind, tolerance in (("gradients", 5e-5), ("final", 1e-4)):
        expected = megatron[kind]
        assert set(ours[kind]) <= set(expected)
        assert len(ours[kind]) > 20
        for key, value in ours[kind].items():
            scale = np.abs(expected[key]).max()
            error = np.abs(value - expected[key]).max()
            assert error <= tolerance * scale, (kind, key, error / scale)
