"""Generating with the key-value cache gives what recomputing the whole prefix gives."""

import numpy as np
import pytest

from tests.distributed.layout import SINGLE, Layout
from tests.megatron.test_hybrid import DELTA_NET

TASKS = "tests.megatron.decoding_tasks"
TP, PP = Layout(tp=2), Layout(pp=2)
# Different lengths, one of them a single token; longer than the window.
PROMPTS = [[5, 99, 17, 3, 64, 20, 111, 8, 45], [77], [1, 2, 3, 4, 120]]
NEW = 8
# Every mechanism that changes what attention sees or how heads are weighted: the options of
# MegasinkTransformerConfig (and of tiny_gpt.model_config) that switch it on.
MECHANISMS = {
    "vanilla": {"attention_variant": "vanilla"},
    "sink": {"attention_variant": "sink"},
    "off-by-one": {"attention_variant": "off-by-one"},
    "vanilla-window": {"attention_variant": "vanilla", "window_size": (3, 0)},
    "sink-window": {"window_size": (3, 0), "window_attn_skip_freq": 2},
    "sink-mha": {"num_query_groups": 4},
    "sink-qk-norm": {"qk_layernorm": True},
    "sink-learned-positions": {"position_embedding_type": "learned_absolute"},
}
NO_POSITIONS = {"position_embedding_type": "none"}
UNBALANCED = {"attention_variant": "vanilla", "head_balance_coeff": 0.0}
GATED = {"attention_variant": "gated"}
# Those that a cache cannot know of: one process, or two where ranks hold a part of them.
OTHERS = {
    "gated-headwise": (GATED, TP),
    "gated-elementwise": (GATED | {"gate_granularity": "elementwise"}, TP),
    "gated-one-layer": (
        GATED | {"gate_granularity": "elementwise", "attention_variant_layers": [0, 1]},
        TP,
    ),
    "gated-value": (GATED | {"gate_position": "value"}, TP),
    "gated-query": (GATED | {"gate_position": "query", "gate_granularity": "elementwise"}, SINGLE),
    "gated-output": (GATED | {"gate_position": "output", "gate_granularity": "elementwise"}, TP),
    "gated-shared-silu": (
        GATED | {"gate_shared_heads": True, "gate_activation": "silu", "gate_operation": "add"},
        TP,
    ),
    "norm-of-the-output": ({"attention_variant": "vanilla", "sdpa_output_norm": "rmsnorm"}, TP),
    "k-bias": ({"attention_variant": "k-bias"}, TP),
    "k-bias-window": ({"attention_variant": "k-bias", "window_size": (3, 0)}, SINGLE),
    "kv-bias-shared": ({"attention_variant": "kv-bias", "bias_shared_heads": True}, TP),
    "v-bias": ({"attention_variant": "v-bias"}, SINGLE),
    "sigmoid": (UNBALANCED | {"attention_similarity": "sigmoid"}, SINGLE),
    "mlp": (UNBALANCED | {"attention_similarity": "mlp", "attention_normalization": "none"}, TP),
    "scaled": ({"attention_scale_alpha": 0.5}, SINGLE),
    "alibi": (NO_POSITIONS | {"attention_bias_type": "alibi"}, TP),
    "t5-window": (NO_POSITIONS | {"attention_bias_type": "t5", "window_size": (3, 0)}, TP),
    "sinusoids": (
        {"position_embedding_type": "learned_absolute", "sinusoidal_position_embedding": True},
        SINGLE,
    ),
    "switch": ({"switch_heads": "value", "switch_experts": 3, "switch_top_k": 2}, TP),
    "sandwich-norm": ({"sandwich_norm": True}, SINGLE),
    "post-norm": ({"post_norm": True}, SINGLE),
    "multi-head-addition": ({"multi_head_addition": True}, TP),
    "latent": ({"latent": True}, TP),
    "latent-vanilla": ({"latent": True, "attention_variant": "vanilla"}, SINGLE),
    "latent-gated": (GATED | {"latent": True, "gate_granularity": "elementwise"}, TP),
    "delta-net": ({"pattern": "G-*-", **DELTA_NET}, TP),
    "delta-net-stages": ({"pattern": "G-G-|*-", **DELTA_NET}, PP),
}


def same(report, tolerance):
    """What one rank of the last stage reports."""
    assert report["batch"] == report["recomputed"]
    assert report["alone"] == report["recomputed"]
    for cached, plain in zip(report["batch logits"], report["recomputed logits"], strict=True):
        cached, plain = np.stack(cached), np.stack(plain)
        assert cached.shape == (NEW, 128)
        assert np.abs(cached - plain).max() <= tolerance * np.abs(plain).max()


@pytest.mark.parametrize("layout", [SINGLE, TP, PP], ids=str)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_cached_decoding_is_recomputing(pool, mechanism, layout):
    compare(pool, MECHANISMS[mechanism], layout)


@pytest.mark.parametrize("mechanism", OTHERS)
def test_cached_decoding_of_other_mechanisms_is_recomputing(pool, mechanism):
    compare(pool, *OTHERS[mechanism])


def compare(pool, options, layout):
    """Tokens and logits with the cache, alone and in a batch, against those without it."""
    reports = pool.run(
        f"{TASKS}:cached_and_recomputed", layout, prompts=PROMPTS, new_tokens=NEW, **options
    )
    same(reports[-1], 1e-5)
    assert len({str(report["batch"]) for report in reports}) == 1  # every rank has the tokens
    # Tokens that do not differ by prompt or step would hide a cache that is never read.
    rows = reports[0]["batch"]
    assert len({tuple(row) for row in rows}) == len(PROMPTS)
    assert len({token for row in rows for token in row}) > NEW // 2


def test_a_delta_net_state_of_another_length_is_refused(pool):
    (refused,) = pool.run(f"{TASKS}:refusal_of_another_state", SINGLE, **DELTA_NET)
    assert "state of layer 1 has 2 tokens, but 5 precede the next one" in refused


@pytest.mark.parametrize("layout", [SINGLE, TP], ids=str)
@pytest.mark.parametrize("mechanism", ["vanilla-window", "sink"])
def test_megatrons_own_static_engine_gives_the_same_tokens(pool, mechanism, layout):
    reports = pool.run(
        f"{TASKS}:through_megatrons_engine",
        layout,
        prompts=PROMPTS,
        new_tokens=NEW,
        **MECHANISMS[mechanism],
    )
    for theirs, ours in reports:
        assert theirs == ours
        assert [len(row) for row in theirs] == [NEW] * len(PROMPTS)
