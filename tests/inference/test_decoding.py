"""Generating with the key-value cache gives what recomputing the whole prefix gives."""

import numpy as np
import pytest

from tests.distributed.layout import SINGLE, Layout

TASKS = "tests.inference.tasks"
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
    options = MECHANISMS[mechanism]
    reports = pool.run(
        f"{TASKS}:cached_and_recomputed", layout, prompts=PROMPTS, new_tokens=NEW, **options
    )
    same(reports[-1], 1e-5)
    assert len({str(report["batch"]) for report in reports}) == 1  # every rank has the tokens
    # Tokens that do not differ by prompt or step would hide a cache that is never read.
    rows = reports[0]["batch"]
    assert len({tuple(row) for row in rows}) == len(PROMPTS)
    assert len({token for row in rows for token in row}) > NEW


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
