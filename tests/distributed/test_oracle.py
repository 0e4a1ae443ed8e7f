"""Training equals plain autograd of language-model loss + Eq. 7 or 8 over reference attention."""

import pytest

from tests.distributed import merging
from tests.distributed.cases import DP, TOLERANCE, TRAIN
from tests.distributed.layout import SINGLE

ORACLE = "tests.distributed.oracle:train"

SHARED = {"head_balance_shared_heads": 1}
REFRESHED = {"head_balance_shared_heads": 2, "head_balance_shared_refresh": 2}


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
    compare(pool, SINGLE, 3, {"attention_variant": variant, **options})


@pytest.mark.parametrize(
    ("scope", "layout"),
    [("global", DP), ("data-parallel", DP), ("data-parallel", SINGLE), ("microbatch", DP)],
    ids=str,
)
@pytest.mark.parametrize("shared", [{}, SHARED, REFRESHED], ids=["eq-7", "eq-8", "eq-8-refreshed"])
def test_every_scope_has_its_oracle(pool, scope, layout, shared):
    compare(pool, layout, 4, {"head_balance_scope": scope, **shared})


FIXED = {"attention_variant": "k-bias", "bias_fixed_value": "uniform", "bias_fixed_value_norm": 5.0}
WINDOW = {"window_size": (7, 0), "window_attn_skip_freq": 2}
MLP = {"attention_variant": "vanilla", "attention_similarity": "mlp"}


@pytest.mark.parametrize(
    ("coeff", "options"),
    [
        (1.0, {"attention_variant": "k-bias"}),
        (1.0, WINDOW | {"attention_variant": "k-bias", "sink_weight_decay": 0.5}),
        (1.0, {"attention_variant": "kv-bias", "bias_shared_heads": True, "sink_lr_mult": 7.0}),
        (1.0, {"attention_variant": "v-bias"}),
        (0.0, {"attention_variant": "v-bias", "num_query_groups": 1}),
        (1.0, FIXED),
        (1.0, {"sink_lr_mult": 0.1, "sink_weight_decay": 0.2}),
        (1.0, {"attention_variant": "vanilla", "attention_scale_alpha": 0.2}),
        (0.0, MLP),
        (0.0, MLP | {"attention_normalization": "none", "attention_scale_alpha": 2.0}),
        (0.0, MLP | WINDOW | {"attention_similarity": "sigmoid"}),
    ],
    ids=str,
)
def test_biases_and_similarities_equal_autograd(pool, coeff, options):
    # The MLP's gradients are sums of both signs over all pairs of tokens: up to 2e-5 on some CPUs.
    tolerance = 5 * TOLERANCE if MLP.items() <= options.items() else TOLERANCE
    compare(pool, SINGLE, 3, options | {"head_balance_coeff": coeff}, tolerance)


def compare(pool, layout, steps, options, tolerance=TOLERANCE):
    """Training in a layout against the oracle of its scope."""
    options = dict(options)
    coeff = options.setdefault("head_balance_coeff", 1.0)
    found = pool.run(TRAIN, layout, steps=steps, **options)
    del options["head_balance_coeff"]
    balance = {
        "scope": options.pop("head_balance_scope", "global"),
        "replicas": layout.dp,
        "shared": options.pop("head_balance_shared_heads", 0),
        "refresh": options.pop("head_balance_shared_refresh", 0),
    }
    wanted = pool.run(ORACLE, SINGLE, coeff=coeff, steps=steps, **balance, **options)
    merging.assert_same_training(found, wanted, tolerance)


def test_the_oracle_notices_another_coefficient(pool):
    (found,) = pool.run(TRAIN, SINGLE, head_balance_coeff=1.0)
    (wanted,) = pool.run(ORACLE, SINGLE, coeff=0.9)
    name = "decoder.layers.1.self_attention.core_attention.softmax_offset"
    arrays = [merging.whole([r["gradients"]])[name] for r in (found, wanted)]
    assert merging.relative_error(*arrays) > 1e-3
