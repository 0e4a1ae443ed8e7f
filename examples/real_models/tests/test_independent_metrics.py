"""Every metric of a text of the page of real models, from transformers' eager attention.

Nothing of megasink measures on the expected side: see `oracle.py`.
"""

import numpy as np
import pytest

from examples.real_models.tests.oracle import (
    BY_TEXT,
    ORACLE,
    cosines,
    needs_model,
    over_keys,
    products,
    small_subject,  # noqa: F401
)

pytestmark = needs_model


@pytest.mark.parametrize("name", BY_TEXT)
def test_a_metric_of_every_text(subject, name):
    expected = ORACLE().each(BY_TEXT[name])
    # Both are float32 passes of one model, through different kernels.
    np.testing.assert_allclose(subject.samples("text")[name], expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "of"), [("other_key_cosine", cosines), ("other_key_product", products)]
)
def test_what_is_of_the_keys_behind_a_query(subject, name, of):
    expected = ORACLE().each(lambda p: over_keys(of(p)))
    found = subject.samples("text")[name]
    assert np.isnan(found[..., 0]).all()
    np.testing.assert_allclose(found[..., 1:], expected, rtol=1e-3, atol=1e-4)


def test_every_metric_of_a_text_is_computed_twice(subject):
    """Or is named here."""
    arrays = subject.samples("text").arrays
    measured = {name.removeprefix("metric/") for name in arrays if name.startswith("metric/")}
    gates = {"gate_score", "gate_std", "gate_min", "gate_max", "sparsity_of_mean_gate",
             "sparsity_of_mean_gate_1e-3"}  # fmt: skip
    assert all(np.isnan(arrays[f"metric/{name}"]).all() for name in gates & measured)
    assert not subject.samples("text")["slot_alpha"].any()
    others = {"other_key_cosine", "other_key_product", "slot_alpha", "random"}
    assert not measured - set(BY_TEXT) - gates - others
