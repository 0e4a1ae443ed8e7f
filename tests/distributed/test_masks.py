"""Prefixes, packed documents and positions: training equals autograd, in every layout."""

from itertools import pairwise

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.layout import SINGLE
from tests.distributed.test_layouts import (
    DISTRIBUTED,
    FULL,
    PP,
    SELECTIVE,
    SP,
    TOLERANCE,
    TP,
    TP_SP,
    VPP,
    name_of,
)

TRAIN = "tests.distributed.masked_gpt:train"
AUTOGRAD = "tests.distributed.masked_gpt:by_autograd"

VANILLA = {"attention_variant": "vanilla"}
NONE = {"position_embedding_type": "none"}
LEARNED = {"position_embedding_type": "learned_absolute"}
PER_TOKEN = {"calculate_per_token_loss": True}
MODELS = {
    "documents": {"documents": True},
    "documents-vanilla-learned": {"documents": True} | VANILLA | LEARNED,
    "documents-t5": {"documents": True, "attention_bias_type": "t5"} | NONE,
    "documents-four-layers": {"documents": True, "num_layers": 4},
    "prefix-vanilla": {"prefix_lm_tokens": 5} | VANILLA,
    "prefix-per-token-loss": {"prefix_lm_tokens": 5} | PER_TOKEN,
    "t5": {"attention_bias_type": "t5"} | NONE,
    "t5-vanilla": {"attention_bias_type": "t5"} | NONE | VANILLA,
    "bucket": {"attention_bias_type": "bucket", "relative_attention_num_buckets": 8} | NONE,
    "alibi-vanilla": {"attention_bias_type": "alibi"} | NONE | VANILLA,
    "sinusoid": {"sinusoidal_position_embedding": True} | LEARNED,
    "none": NONE,
}
CASES = [
    ("documents", TP_SP, SP),
    ("documents", PP, {}),
    ("documents", PP, FULL),
    ("documents", TP, SELECTIVE),
    ("documents-vanilla-learned", PP, {}),
    ("documents-t5", TP_SP, SP),
    ("documents-four-layers", VPP, {}),
    ("prefix-vanilla", TP_SP, SP),
    ("prefix-vanilla", PP, {}),
    ("prefix-per-token-loss", TP_SP, SP),
    ("t5", TP_SP, SP | FULL),
    ("t5", PP, DISTRIBUTED),
    ("t5-vanilla", TP, {}),
    ("alibi-vanilla", TP_SP, SP),
    ("alibi-vanilla", PP, {}),
    ("sinusoid", TP_SP, SP),
    ("sinusoid", PP, {}),
]


@pytest.fixture(scope="module")
def single(pool):
    """The report of one process for a model."""
    return lambda model: pool.once(TRAIN, SINGLE, steps=2, **MODELS[model])


@pytest.mark.parametrize(("model", "layout", "options"), CASES, ids=name_of)
def test_layout_changes_nothing(pool, single, model, layout, options):
    reports = pool.run(TRAIN, layout, steps=2, **MODELS[model], **options)
    merging.assert_same_training(reports, single(model), TOLERANCE)


@pytest.mark.parametrize("model", [m for m in MODELS if m != "documents-four-layers"])
def test_training_equals_autograd_document_by_document(pool, model):
    (found,) = pool.run(TRAIN, SINGLE, steps=1, head_balance_scope="microbatch", **MODELS[model])
    options = {k: v for k, v in MODELS[model].items() if k != "calculate_per_token_loss"}
    (wanted,) = pool.run(AUTOGRAD, SINGLE, head_balance_coeff=1.0, **options)
    np.testing.assert_allclose(merging.loss([found]), merging.loss([wanted]), rtol=TOLERANCE)
    importance = found["statistics"][0]["importance_LH"]
    np.testing.assert_allclose(importance, wanted["importance_LH"], rtol=TOLERANCE)
    ours, expected = (merging.whole([r["gradients"]]) for r in (found, wanted))
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        error = merging.relative_error(ours[name], gradient)
        assert error <= TOLERANCE, f"{name}: {error:.2e}"


def test_what_is_compared_depends_on_the_mask_and_on_the_positions(single):
    """Otherwise the tests above would compare models that are all alike."""
    losses = {model: merging.loss(single(model))[0] for model in MODELS}
    del losses["prefix-per-token-loss"], losses["prefix-vanilla"]  # of fewer targets
    values = sorted(losses.values())
    assert min(b - a for a, b in pairwise(values)) > 1e-4, losses


def test_the_table_of_t5_is_trained_and_that_of_sinusoids_is_not(single):
    (report,) = single("t5")
    name = "decoder.layers.1.self_attention.core_attention.relative_bias.weight"
    gradient = report["gradients"][name]
    assert gradient["tensor"].shape == (32, 4)
    # Of 32 distances: each of the first 16 has a bucket, and the rest share buckets 16 to 21.
    reached = np.abs(gradient["tensor"]).max(1) > 0
    assert reached[:22].all()
    assert not reached[22:].any()
    assert not any("position_embeddings" in n for n in single("sinusoid")[0]["final"])


def test_a_checkpoint_of_biases_loads_under_another_layout(pool, tmp_path):
    options = {"distributed_optimizer": True, "attention_bias_type": "t5", **NONE}
    tasks, folder = "tests.distributed.checkpoint_tasks", str(tmp_path)
    saved = pool.run(f"{tasks}:save_and_go_on", TP, folder=folder, **options)
    loaded = pool.run(f"{tasks}:load_and_go_on", PP, folder=folder, **options)
    for kind in ("weights", "param", "exp_avg"):
        found, wanted = (merging.whole([r["saved"][kind] for r in rs]) for rs in (loaded, saved))
        assert found.keys() == wanted.keys()
        for name in (n for n in wanted if n.endswith("relative_bias.weight")):
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=f"{kind} of {name}")
            assert found[name].any()
    np.testing.assert_allclose(merging.loss(loaded), merging.loss(saved), rtol=TOLERANCE)
