"""Packed documents on context-parallel ranks, against one process.

The row is split at 16, 32 and 48 of 64 tokens over two ranks: inside documents, and between two.
One process is compared with autograd, document by document, in test_masks.py; other places to cut
are in tests/megatron/test_context_parallel.py, and other models without documents in
test_context_parallel.py.
"""

from itertools import pairwise

import pytest

from tests.distributed import merging
from tests.distributed.cases import (
    CP,
    DISTRIBUTED,
    DOCUMENTS,
    FULL,
    PADDED,
    SELECTIVE,
    SP,
    TOLERANCE,
)
from tests.distributed.layout import SINGLE, Layout

TRAIN = "tests.distributed.masked_gpt:train"
ORACLE = "tests.distributed.oracle:train"
GATHERED, SCATTERED = {"cp_comm_type": "all_gather"}, {"cp_comm_type": "a2a"}

STEP = {"steps": 1, "head_balance_scope": "microbatch"} | DOCUMENTS
VANILLA = {"attention_variant": "vanilla"}
GATED = {"attention_variant": "gated"}
ELEMENTWISE = GATED | {"gate_granularity": "elementwise"}
NONE = {"position_embedding_type": "none"}
WINDOW = {"window_size": (7, 0), "window_attn_skip_freq": 2}
# Padding at the ends of samples, and targets masked out: no two ranks have as many.
UNEVEN = PADDED
PER_TOKEN = UNEVEN | {"calculate_per_token_loss": True}
MODELS = {
    "sink": {},
    "vanilla": VANILLA,
    "kv-bias-shared": {"attention_variant": "kv-bias", "bias_shared_heads": True},
    "v-bias-uneven": {"attention_variant": "v-bias"} | UNEVEN,
    "window": WINDOW,
    "vanilla-no-balance": VANILLA | {"head_balance_coeff": 0.0} | UNEVEN,
    "t5-vanilla": {"attention_bias_type": "t5"} | NONE | VANILLA,
    "one-group-qk-norm": {"num_query_groups": 1, "qk_layernorm": True},
    "learned-positions": {"position_embedding_type": "learned_absolute"},
    "interleaved-rope": {"rotary_interleaved": True},
    "elementwise-per-token": ELEMENTWISE | PER_TOKEN,
    "sink-uneven": UNEVEN,
    "vanilla-per-token": VANILLA | PER_TOKEN,
    "latent": {"latent": True},
}
CASES = [
    *((model, GATHERED) for model in MODELS),
    *((model, SCATTERED) for model in ("sink", "kv-bias-shared", "window", "t5-vanilla")),
    *((model, SCATTERED) for model in ("vanilla-no-balance", "sink-uneven", "vanilla-per-token")),
]
# Of several steps, by layout: the scopes of the balance loss, and what the rest of training adds.
RUNS = [
    (CP, {"head_balance_scope": "global"} | GATHERED | FULL | UNEVEN),
    (CP, {"head_balance_scope": "global"} | SCATTERED | DISTRIBUTED | PER_TOKEN),
    (CP, {"head_balance_scope": "microbatch"} | SCATTERED | SELECTIVE | UNEVEN | VANILLA),
    (CP, {"head_balance_scope": "data-parallel"} | GATHERED | ELEMENTWISE | PER_TOKEN),
]
FOUR = [
    (Layout(tp=2, cp=2, sp=True), {"head_balance_scope": "microbatch"} | SP | PER_TOKEN),
    (Layout(tp=2, cp=2), {"head_balance_scope": "global"} | GATED | UNEVEN),
    (Layout(pp=2, cp=2), {"head_balance_scope": "global"} | SCATTERED | PER_TOKEN | FULL),
    (Layout(cp=4), {"head_balance_scope": "microbatch"} | UNEVEN | VANILLA),
    (Layout(cp=2, dp=2), {"head_balance_scope": "global"} | SCATTERED | PER_TOKEN),
]
# What changes the layout alone.
OF_LAYOUT = {*SP, *FULL, *SELECTIVE, *DISTRIBUTED, *GATHERED}


def name_of(value):
    """Of a parameter of a test: a model, a layout or options."""
    if isinstance(value, dict):
        return "+".join(k if v is True else str(v) for k, v in value.items())
    return str(value)


@pytest.fixture(scope="module")
def single(pool):
    """The report of one process for a model."""
    return lambda model: pool.once(TRAIN, SINGLE, **STEP | MODELS[model])


@pytest.mark.parametrize(("model", "kind"), CASES, ids=name_of)
def test_two_ranks_equal_one_process(pool, single, model, kind):
    found = pool.run(TRAIN, CP, **kind, **STEP | MODELS[model])
    merging.assert_same_training(found, single(model), TOLERANCE)


@pytest.fixture
def compare(pool):
    """Two steps in a layout of a pool against one process."""

    def run(workers, layout, options):
        options = {"steps": 2} | DOCUMENTS | options
        of_model = {key: value for key, value in options.items() if key not in OF_LAYOUT}
        wanted = pool.once(TRAIN, SINGLE, **of_model)
        merging.assert_same_training(workers.run(TRAIN, layout, **options), wanted, TOLERANCE)

    return run


@pytest.mark.parametrize(("layout", "options"), RUNS, ids=name_of)
def test_runs_of_two_ranks_equal_one_process(pool, compare, layout, options):
    compare(pool, layout, options)


@pytest.mark.parametrize(("layout", "options"), FOUR, ids=name_of)
def test_runs_of_four_ranks_equal_one_process(four, compare, layout, options):
    compare(four, layout, options)


@pytest.mark.parametrize("options", [UNEVEN, PER_TOKEN], ids=["uneven", "per-token"])
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(cp=2, dp=2)], ids=str)
def test_replicas_with_other_numbers_of_tokens_share_one_importance(four, layout, options):
    """The scope of the replicas is not that of one process: against autograd."""
    options = {"steps": 1} | DOCUMENTS | options
    found = four.run(TRAIN, layout, head_balance_scope="data-parallel", **options)
    options |= {"coeff": 1.0, "scope": "data-parallel"}
    wanted = four.once(ORACLE, SINGLE, replicas=2, **options)
    merging.assert_same_training(found, wanted, TOLERANCE)
    alone = four.once(ORACLE, SINGLE, replicas=1, **options)
    one, other = (merging.whole([w["gradients"] for w in each]) for each in (wanted, alone))
    name = "decoder.layers.0.self_attention.core_attention.softmax_offset"
    assert merging.relative_error(other[name], one[name]) > 1e-3


@pytest.mark.parametrize("kind", [GATHERED, SCATTERED], ids=name_of)
def test_bfloat16_is_as_near_as_one_process(pool, single, kind):
    """At most twice as far from float32 as one process in bfloat16."""
    exact = merging.whole([single("vanilla")[0]["gradients"]])
    step = STEP | VANILLA | {"bf16": True}
    errors = []
    for reports in (pool.once(TRAIN, SINGLE, **step), pool.run(TRAIN, CP, **kind, **step)):
        found = merging.whole([report["gradients"] for report in reports])
        errors.append({n: merging.relative_error(found[n], exact[n]) for n in exact})
    alone, ours = errors
    assert {n: e for n, e in ours.items() if e > 2 * alone[n] + 2**-8} == {}


def test_the_models_differ(single):
    """Otherwise the comparisons above would be of one model."""
    even = [model for model, options in MODELS.items() if "masked" not in options]
    losses = sorted(merging.loss(single(model))[0] for model in even)
    # The head-balance loss is in the gradients, not in this loss.
    assert min(b - a for a, b in pairwise(losses)) > 1e-5, losses
