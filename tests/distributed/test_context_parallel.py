"""Everything that composes with context parallelism, on two ranks against one process.

One step in the scope of a microbatch, where the balance loss has its gradient at once. The scopes
and three steps of the optimizer are in test_invariance.py, the attention itself in
tests/megatron/test_context_parallel.py. Not covered: TransformerEngine's layers, which need CUDA.
"""

from itertools import pairwise

import pytest

from tests.distributed import merging
from tests.distributed.cases import CP, TOLERANCE, TRAIN
from tests.distributed.layout import SINGLE

GATHERED, SCATTERED, RING = "all_gather", "a2a", "p2p"
STEP = {"steps": 1, "head_balance_scope": "microbatch"}
VANILLA = {"attention_variant": "vanilla"}
GATED = {"attention_variant": "gated"}
ELEMENTWISE = GATED | {"gate_granularity": "elementwise"}
NONE = {"position_embedding_type": "none"}
WINDOW = {"window_size": (7, 0), "window_attn_skip_freq": 2}
MLP = VANILLA | {
    "attention_similarity": "mlp",
    "attention_normalization": "none",
    "head_balance_coeff": 0.0,
}
MODELS = {
    "off-by-one": {"attention_variant": "off-by-one"},
    "k-bias": {"attention_variant": "k-bias"},
    "kv-bias-shared": {"attention_variant": "kv-bias", "bias_shared_heads": True},
    "v-bias": {"attention_variant": "v-bias"},
    "window": WINDOW,
    "window-vanilla": WINDOW | VANILLA,
    "vanilla": VANILLA,
    "vanilla-no-balance": VANILLA | {"head_balance_coeff": 0.0},
    "t5": {"attention_bias_type": "t5"} | NONE,
    "t5-vanilla": {"attention_bias_type": "t5"} | NONE | VANILLA,
    "alibi": {"attention_bias_type": "alibi"} | NONE,
    "prefix": {"prefix_lm_tokens": 11} | VANILLA,
    "mlp-similarity": MLP,
    "sigmoid-window": MLP | WINDOW | {"attention_similarity": "sigmoid"},
    "one-group-qk-norm": {"num_query_groups": 1, "qk_layernorm": True},
    "learned-positions-tied": {"position_embedding_type": "learned_absolute", "tied": True},
    "interleaved-rope": {"rotary_interleaved": True},
    "shared-gate": ELEMENTWISE | {"gate_shared_heads": True},
    "value-gate": ELEMENTWISE | {"gate_position": "value"},
    "output-gate-norm": ELEMENTWISE | {"gate_position": "output", "sdpa_output_norm": "rmsnorm"},
    "head-sum-alpha": {"multi_head_addition": True, "attention_scale_alpha": 0.5},
}
CASES = [
    *((model, GATHERED) for model in MODELS if model not in ("prefix", "vanilla")),
    *((model, SCATTERED) for model in ("kv-bias-shared", "k-bias", "window-vanilla", "t5")),
    *((model, SCATTERED) for model in ("prefix", "mlp-similarity", "shared-gate", "alibi")),
    *((model, RING) for model in ("off-by-one", "kv-bias-shared", "k-bias", "vanilla")),
    *((model, RING) for model in ("vanilla-no-balance", "shared-gate", "one-group-qk-norm")),
]


@pytest.fixture(scope="module")
def single(pool):
    """The report of one process for a model."""
    return lambda model: pool.once(TRAIN, SINGLE, **STEP | MODELS[model])


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_two_ranks_equal_one_process(pool, single, model, kind):
    found = pool.run(TRAIN, CP, cp_comm_type=kind, **STEP | MODELS[model])
    merging.assert_same_training(found, single(model), TOLERANCE)


def test_the_layers_may_communicate_in_different_ways(pool, single):
    kinds = {"cp_comm_type": [SCATTERED, GATHERED]}
    found = pool.run(TRAIN, CP, **kinds, **STEP | MODELS["k-bias"])
    merging.assert_same_training(found, single("k-bias"), TOLERANCE)


def test_the_models_differ(single):
    """Otherwise the comparisons above would be of one model."""
    losses = sorted(merging.loss(single(model))[0] for model in MODELS)
    # The head-balance loss is in the gradients, not in this loss; biases of the projection are 0.
    same = [a for a, b in pairwise(losses) if b - a < 1e-5]
    assert len(same) <= 1


@pytest.mark.parametrize("kind", [GATHERED, SCATTERED])
def test_half_precision_scales_the_balance_loss_as_the_other(pool, kind):
    """fp16 through its gradient scaler; a balance loss that is not unscaled would be far off."""
    (exact,) = pool.once(TRAIN, SINGLE, **STEP)
    fp16 = [
        {"fp16": True, "optimizer_options": {"initial_loss_scale": scale}}
        for scale in (2.0**4, 2.0**12)
    ]
    for options in ({"bf16": True}, *fp16):
        reports = pool.run(TRAIN, CP, cp_comm_type=kind, **options, **STEP)
        assert reports[0]["grad_norm"][0] == pytest.approx(exact["grad_norm"][0], rel=1e-2)
        assert reports[1]["grad_norm"] == reports[0]["grad_norm"]


def test_what_is_not_computed_is_refused_by_the_layer(pool):
    problems = pool.run("tests.megatron.context_tasks:refusals", CP)[0]
    assert problems.keys() == {"p2p", "ring", "documents in a ring", "prefix", "documents", "row"}
    assert "use all_gather or a2a or p2p" in problems["p2p"]
    named = "--window-size, --attention-bias-type alibi, --attention-variant v-bias"
    assert f"'p2p' rejects {named}: use 'all_gather'" in problems["ring"]
    assert "cp_comm_type 'p2p' does not support cu_seqlens" in problems["documents in a ring"]
    assert "use cp_comm_type 'a2a'" in problems["prefix"]
    assert "format thd splits each packed document" in problems["documents"]
    assert "packed documents of 12 tokens, but 8 queries" in problems["row"]
