"""Rows that pad the vocabulary: no probability, no gradient, whatever the layout."""

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.layout import SINGLE, Layout

TASKS = "tests.megatron.padding_tasks"
TOKENS = 67
ROWS = ("word_embeddings.weight", "output_layer.weight")
TP, PP = Layout(tp=2), Layout(pp=2)
TP_SP = Layout(tp=2, sp=True), {"sequence_parallel": True}
FUSED = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}


@pytest.fixture(scope="module")
def definition(pool):
    """Losses and gradients of the unpadded model in float64, by (rows, tied)."""
    return lambda rows, tied: pool.once(
        f"{TASKS}:unpadded", SINGLE, rows=rows, tokens=TOKENS, tied=tied
    )[0]


@pytest.mark.parametrize(
    ("layout", "rows", "options"),
    [
        (SINGLE, 128, {}),
        (SINGLE, 128, {"tied": True}),
        (TP, 128, {}),  # the second rank has 3 tokens
        (TP, 256, {"tied": True}),  # it has padding alone
        (TP_SP[0], 128, {"tied": True, **TP_SP[1]}),
        (PP, 128, {"tied": True}),
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_without_padding(pool, definition, layout, rows, options):
    reports = pool.run(f"{TASKS}:padded", layout, rows=rows, tokens=TOKENS, **options)
    wanted = definition(rows, options.get("tied", False))
    for losses in (r["losses"] for r in reports if r["losses"] is not None):
        np.testing.assert_allclose(losses, wanted["losses"], rtol=2e-5)
    compare(reports, wanted, 2e-5)


@pytest.mark.parametrize("layout", [SINGLE, TP], ids=str)
def test_fused_cross_entropy(pool, definition, layout):
    """Megatron's rounds the gradient of the logits to bfloat16."""
    reports = pool.run(f"{TASKS}:padded", layout, rows=256, tokens=TOKENS, **FUSED)
    wanted = definition(256, False)
    np.testing.assert_allclose(reports[0]["losses"], wanted["losses"], rtol=2e-5)
    compare(reports, wanted, 1e-2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(pool, definition, dtype):
    """Where a rank has padding alone, nothing overflows."""
    reports = pool.run(f"{TASKS}:padded", TP, rows=256, tokens=TOKENS, **{dtype: True})
    np.testing.assert_allclose(
        reports[0]["losses"], definition(256, False)["losses"], rtol=0.05, atol=0.1
    )
    gradients = merging.whole([report["gradients"] for report in reports])
    assert all(np.isfinite(array).all() for array in gradients.values())
    assert not gradients["output_layer.weight"][TOKENS:].any()


def compare(reports, wanted, tolerance):
    gradients = merging.whole([report["gradients"] for report in reports])
    assert gradients.keys() == wanted["gradients"].keys()
    for name, expected in wanted["gradients"].items():
        found = gradients[name]
        if name.endswith(ROWS):
            assert not found[TOKENS:].any(), name
            found = found[:TOKENS]
        assert merging.relative_error(found, expected) < tolerance, name


def test_all_rows_count_where_the_tokens_are_not_known(pool, definition):
    """As upstream: the padding takes probability, and the rows have gradients."""
    (report,) = pool.run(f"{TASKS}:padded", SINGLE, rows=128, tokens=None)
    assert np.abs(report["gradients"]["output_layer.weight"]["tensor"][TOKENS:]).min() > 0


def test_logits_are_masked_whole_and_in_parts(pool):
    (single,) = pool.run(f"{TASKS}:inferred", SINGLE, rows=256, tokens=TOKENS)
    ranks = pool.run(f"{TASKS}:inferred", TP, rows=256, tokens=TOKENS)
    whole = single["part"]
    assert whole.shape[-1] == 256
    assert (whole[..., TOKENS:] < -1e38).all()
    assert np.abs(whole[..., :TOKENS]).max() < 1e3
    for report in ranks:
        np.testing.assert_allclose(report["gathered"], whole, rtol=1e-4, atol=1e-4)
        part = np.split(whole, 2, -1)[report["rank"]]
        np.testing.assert_allclose(report["part"], part, rtol=1e-4, atol=1e-4)
