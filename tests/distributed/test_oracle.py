"""Training equals plain autograd of language-model loss + Eq. 7 over the reference attention."""

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.layout import SINGLE
from tests.distributed.test_layouts import TOLERANCE, TRAIN

ORACLE = "tests.distributed.oracle:train"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True},
        {"window_size": (7, 0), "window_attn_skip_freq": 2},
        {"num_query_groups": 1},
        {"num_query_groups": 4, "qk_layernorm": True},
    ],
    ids=["plain", "tied", "window", "one-group", "no-groups-qk-norm"],
)
@pytest.mark.parametrize("variant", ["vanilla", "sink", "off-by-one"])
def test_training_equals_autograd_of_eq_7(pool, variant, options):
    options = {"attention_variant": variant, **options}
    (found,) = pool.run(TRAIN, SINGLE, head_balance_coeff=1.0, **options)
    (wanted,) = pool.run(ORACLE, SINGLE, coeff=1.0, **options)
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=TOLERANCE)
    np.testing.assert_allclose(found["grad_norm"], wanted["grad_norm"], rtol=TOLERANCE)
    for step_found, step_wanted in zip(found["statistics"], wanted["statistics"], strict=True):
        for key in step_wanted:
            np.testing.assert_allclose(step_found[key], step_wanted[key], rtol=TOLERANCE)
    for kind in ("initial", "gradients", "final"):
        arrays_found, arrays_wanted = (merging.whole([r[kind]]) for r in (found, wanted))
        assert arrays_found.keys() == arrays_wanted.keys()
        for name, array in arrays_wanted.items():
            error = merging.relative_error(arrays_found[name], array)
            assert error <= TOLERANCE, f"{kind} of {name}: {error:.2e}"


def test_the_oracle_notices_another_coefficient(pool):
    (found,) = pool.run(TRAIN, SINGLE, head_balance_coeff=1.0, steps=1)
    (wanted,) = pool.run(ORACLE, SINGLE, coeff=0.9, steps=1)
    name = "decoder.layers.1.self_attention.core_attention.softmax_offset"
    arrays = [merging.whole([r["gradients"]])[name] for r in (found, wanted)]
    assert merging.relative_error(*arrays) > 1e-3
