"""Multi-token prediction (--mtp-num-layers): its layers have megasink's attention.

Its losses are Megatron's. Attention is compared with its definition in every layer, and layouts
with one process.
"""

import pytest

from tests.distributed import merging
from tests.distributed.cases import EP, FULL, PP, SP, TOLERANCE, TP_SP, TRAIN, name_of
from tests.distributed.layout import SINGLE
from tests.distributed.test_moe import MOE
from tests.distributed.test_oracle import compare

SINKS = {"mtp_num_layers": 1}
LATENT = SINKS | {"latent": True}
GATES = SINKS | {"attention_variant": "gated", "gate_granularity": "elementwise"}


@pytest.mark.parametrize("options", [SINKS, GATES, LATENT], ids=name_of)
def test_training_equals_autograd(pool, options):
    compare(pool, SINGLE, 3, options)


CASES = {
    "sinks-tp": (SINKS, TP_SP, SP),
    "sinks-pp-recompute": (SINKS, PP, FULL),
    "latent-tp": (LATENT, TP_SP, SP),
    "gates-pp": (GATES, PP, {}),
    "gates-in-some-layers": (GATES | {"attention_variant_layers": [1, 0]}, PP, {}),
    "experts": (SINKS | MOE, EP, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_layout_changes_nothing(pool, name):
    options, layout, how = CASES[name]
    found = pool.run(TRAIN, layout, **options, **how)
    merging.assert_same_training(found, pool.once(TRAIN, SINGLE, **options), TOLERANCE)


def test_its_sinks_are_trained_and_its_heads_not_counted(pool):
    (with_it,), (without,) = (
        pool.once(TRAIN, SINGLE, **options, steps=1) for options in (SINKS, {})
    )
    gradients = merging.whole([with_it["gradients"]])
    name = "mtp.layers.0.mtp_model_layer.self_attention.core_attention.softmax_offset"
    assert abs(gradients[name]).min() > 0
    first, second = (report["statistics"][0]["importance_LH"] for report in (with_it, without))
    assert first.tolist() == second.tolist()
