"""The head-balance loss is the same in every layout: each scope against its own oracle.

For each mechanism and scope a rich layout on two or four ranks, for each layout a mechanism and a
scope: loss, every gradient, the gradient norm and three steps of Adam, against one process that
runs plain autograd over reference attention and Eq. 7 (oracle.py). Not the whole product: the
mechanisms meet the layouts in core attention alone, and the scopes in MegatronLayerBalance.
"""

import pytest

from tests.distributed import merging
from tests.distributed.cases import DISTRIBUTED, FULL, SELECTIVE, SP, TOLERANCE, TRAIN, name_of
from tests.distributed.layout import SINGLE, Layout

ORACLE = "tests.distributed.oracle:train"

MODELS = {
    "vanilla": {"attention_variant": "vanilla"},
    "sink": {"attention_variant": "sink"},
    "headwise": {"attention_variant": "gated"},
    "elementwise": {"attention_variant": "gated", "gate_granularity": "elementwise"},
}
OVERLAPPED = DISTRIBUTED | {"overlap": True}
A2A = {"cp_comm_type": "a2a"}
# Targets masked out of the loss, as in fine-tuning: microbatches and ranks have different numbers.
MASKED = {"masked": True}
PER_TOKEN = MASKED | {"calculate_per_token_loss": True}
FOUR_LAYERS = {"num_layers": 4}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
# What changes the layout alone, and so is nothing to the oracle.
OF_LAYOUT = {*SP, *FULL, *SELECTIVE, *OVERLAPPED, *A2A}

CASES = [
    ("vanilla", "global", Layout(tp=2, sp=True), SP | FULL),
    ("vanilla", "data-parallel", Layout(dp=2), OVERLAPPED | PER_TOKEN),
    ("vanilla", "microbatch", Layout(cp=2), {}),
    ("sink", "global", Layout(cp=2), A2A | SELECTIVE),
    ("sink", "data-parallel", Layout(pp=2, vpp=2), FOUR_LAYERS),
    ("sink", "microbatch", Layout(dp=2), PER_TOKEN | FULL),
    ("headwise", "global", Layout(pp=2), PER_TOKEN | FULL),
    ("headwise", "data-parallel", Layout(cp=2), MASKED | FULL),
    ("headwise", "microbatch", Layout(tp=2), {}),
    ("elementwise", "global", Layout(dp=2), OVERLAPPED),
    ("elementwise", "data-parallel", Layout(tp=2, sp=True), SP | PER_TOKEN),
    ("elementwise", "microbatch", Layout(cp=2), A2A | PER_TOKEN | FULL),
    ("headwise", "microbatch", Layout(dp=2, ep=2), MOE),
]
FOUR_RANKS = [
    ("vanilla", "data-parallel", Layout(tp=2, cp=2, sp=True), SP | OVERLAPPED),
    ("sink", "global", Layout(tp=2, pp=2), DISTRIBUTED),
    ("sink", "microbatch", Layout(pp=2, cp=2), PER_TOKEN | FULL),
    ("headwise", "global", Layout(cp=2, dp=2), A2A | OVERLAPPED | PER_TOKEN),
    ("headwise", "data-parallel", Layout(tp=2, dp=2), FULL),
    ("elementwise", "global", Layout(cp=4), MASKED),
]


@pytest.fixture(scope="module")
def oracle(pool):
    """The report of the oracle of a mechanism and scope, computed once."""
    return lambda **options: pool.once(ORACLE, SINGLE, coeff=1.0, **options)


@pytest.fixture
def check(oracle):
    """Train in a layout of a pool, and compare."""

    def run(pool, mechanism, scope, layout, options):
        model = MODELS[mechanism] | options
        found = pool.run(TRAIN, layout, head_balance_scope=scope, head_balance_coeff=1.0, **model)
        of_model = {key: value for key, value in model.items() if key not in OF_LAYOUT}
        replicas = layout.dp if scope == "data-parallel" else 1
        wanted = oracle(scope=scope, replicas=replicas, **of_model)
        merging.assert_same_training(found, wanted, TOLERANCE)

    return run


@pytest.mark.parametrize(("mechanism", "scope", "layout", "options"), CASES, ids=name_of)
def test_two_ranks_equal_the_oracle(pool, check, mechanism, scope, layout, options):
    check(pool, mechanism, scope, layout, options)


@pytest.mark.parametrize(("mechanism", "scope", "layout", "options"), FOUR_RANKS, ids=name_of)
def test_four_ranks_equal_the_oracle(four, check, mechanism, scope, layout, options):
    check(four, mechanism, scope, layout, options)


def test_the_loss_and_the_masks_matter_for_what_is_compared(oracle):
    """Otherwise a layout that forgets them would pass."""
    options = {"scope": "microbatch", "replicas": 1, "attention_variant": "sink"}
    gradients = [
        merging.whole([report["gradients"]])
        for extra in ({}, {"masked": True}, PER_TOKEN)
        for report in oracle(**options, **extra)
    ]
    name = "decoder.layers.0.self_attention.core_attention.softmax_offset"
    for other in gradients[1:]:
        assert merging.relative_error(other[name], gradients[0][name]) > 1e-3
    assert merging.relative_error(gradients[1][name], gradients[2][name]) > 1e-3
