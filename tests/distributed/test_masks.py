"""Prefixes, packed documents and positions: training equals autograd, in every layout."""

from itertools import pairwise

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.cases import DOCUMENTS, PADDED, TOLERANCE, case, cases
from tests.distributed.layout import SINGLE
from tests.distributed.test_latent import YARN

TRAIN = "tests.distributed.masked_gpt:train"
ORACLE = "tests.distributed.oracle:train"

VANILLA = {"attention_variant": "vanilla"}
NONE = {"position_embedding_type": "none"}
LEARNED = {"position_embedding_type": "learned_absolute"}
PREFIX = {"prefix_lm_tokens": 5}
PER_TOKEN = PADDED | {"calculate_per_token_loss": True}
T5 = NONE | {"attention_bias_type": "t5"}
BUCKET = NONE | {"attention_bias_type": "bucket", "relative_attention_num_buckets": 8}
# Layouts, and options of the model.
MODELS = {
    "documents": ("sp pp pp+full tp+selective", DOCUMENTS),
    "documents-vanilla-learned": ("pp", DOCUMENTS | VANILLA | LEARNED),
    "documents-t5": ("sp", DOCUMENTS | T5),
    "documents-four-layers": ("vpp", DOCUMENTS | {"num_layers": 4}),
    "documents-padded": ("sp dp", DOCUMENTS | PADDED),
    "documents-latent": ("sp pp+full", DOCUMENTS | {"latent": True}),
    "documents-latent-yarn-gated": (
        "pp+selective",
        DOCUMENTS | YARN | {"latent": True, "attention_variant": "gated"},
    ),
    "documents-per-token": ("pp dp", DOCUMENTS | PER_TOKEN),
    "prefix-vanilla": ("sp pp", PREFIX | VANILLA),
    "prefix-per-token-loss": ("sp", PREFIX | {"calculate_per_token_loss": True}),
    "t5": ("sp+full pp+distributed", T5),
    "t5-vanilla": ("tp", T5 | VANILLA),
    "bucket": ("", BUCKET),
    "alibi-vanilla": ("sp pp", NONE | VANILLA | {"attention_bias_type": "alibi"}),
    "sinusoid": ("sp pp", LEARNED | {"sinusoidal_position_embedding": True}),
    "none": ("", NONE),
}


@pytest.fixture(scope="module")
def single(pool):
    """The report of one process for a model."""
    return lambda model: pool.once(TRAIN, SINGLE, steps=2, **MODELS[model][1])


@pytest.mark.parametrize(("model", "where"), cases(MODELS))
def test_layout_changes_nothing(pool, single, model, where):
    layout, options = case(where)
    reports = pool.run(TRAIN, layout, steps=2, **MODELS[model][1], **options)
    merging.assert_same_training(reports, single(model), TOLERANCE)


@pytest.mark.parametrize("model", [m for m in MODELS if m != "documents-four-layers"])
def test_training_equals_autograd_document_by_document(pool, model):
    options = MODELS[model][1]
    found = pool.run(TRAIN, SINGLE, steps=1, head_balance_scope="microbatch", **options)
    wanted = pool.run(ORACLE, SINGLE, coeff=1.0, steps=1, scope="microbatch", **options)
    merging.assert_same_training(found, wanted, TOLERANCE)


def test_what_is_compared_depends_on_the_mask_and_on_the_positions(single):
    """Otherwise the tests above would compare models that are all alike."""
    losses = {model: merging.loss(single(model))[0] for model in MODELS}
    for model in ("prefix-per-token-loss", "prefix-vanilla", "documents-padded"):
        del losses[model]  # of fewer targets
    del losses["documents-per-token"]
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
