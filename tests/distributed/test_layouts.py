"""Loss, statistics, gradients, gradient norm and weights are the same in every layout.

Float32, three steps of Adam through Megatron's schedules; the single process is itself compared
with plain autograd in test_oracle.py, and the options of the block with their definition in
tests/megatron/test_block.py. Context parallelism is in test_context_parallel.py, expert parallelism
in test_moe.py, the scopes in test_invariance.py.
"""

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.cases import FULL, PP, SELECTIVE, TOLERANCE, TRAIN, VPP, case, cases
from tests.distributed.layout import SINGLE

TASKS = "tests.cpu.tasks"
VANILLA = {"attention_variant": "vanilla"}
OFF = {"head_balance_coeff": 0.0}
HEADWISE = {"attention_variant": "gated"}
ELEMENTWISE = HEADWISE | {"gate_granularity": "elementwise"}
KV_BIAS = {"attention_variant": "kv-bias", "bias_shared_heads": True}
WINDOW = {"window_size": (7, 0), "window_attn_skip_freq": 2}
# A signed row that cancels to a sum near 1 would multiply the rounding of another layout.
MLP = VANILLA | OFF | {"attention_similarity": "mlp", "attention_normalization": "none"}
POST_NORM = {"post_norm": True, "residual_clip": 1.0, "normalization": "LayerNorm"}
QK_NORM = {"qk_layernorm": True}
EXPERTS = {"switch_experts": 3, "switch_top_k": 3}

# Layouts, and options of the model: each has its own oracle, a single process.
MODELS = {
    "sink": (
        "sp sp+full pp pp+full dp+distributed+overlap dp+distributed+selective single+full "
        "single+selective",
        {},
    ),
    "vanilla": ("sp+full pp", VANILLA),
    "off-by-one": ("tp", {"attention_variant": "off-by-one"}),
    "tied": ("sp dp+distributed pp", {"tied": True}),
    "per-token-loss": ("pp", {"calculate_per_token_loss": True}),
    "one-group": ("sp", {"num_query_groups": 1}),
    "qk-norm": ("sp", QK_NORM),
    "window": ("tp pp", WINDOW),
    "four-layers": ("vpp+full+distributed", {"num_layers": 4}),
    "no-balance": ("sp", OFF),
    "vanilla-no-balance": ("pp", VANILLA | OFF),
    "shared": ("tp pp", {"head_balance_shared_heads": 1, "head_balance_scope": "microbatch"}),
    "k-bias": ("sp+full pp", {"attention_variant": "k-bias", "sink_lr_mult": 3.0}),
    "kv-bias-shared": ("dp+distributed sp+selective pp", KV_BIAS),
    "mlp-similarity": ("sp+full pp", MLP),
    "layernorm": ("sp pp", {"normalization": "LayerNorm", "add_bias_linear": True}),
    # The block.
    "sandwich": ("tp sp+selective-mlp pp+full", {"sandwich_norm": True}),
    "sandwich-biases": ("sp", {"sandwich_norm": True, "add_bias_linear": True}),
    "post-norm-clip": ("tp sp+full pp", POST_NORM),
    "clip": ("sp", {"residual_clip": 1.0}),
    "addition": ("tp sp+full pp", {"multi_head_addition": True, "add_bias_linear": True}),
    # One step: where its input is near 0, rounding decides whether relu has a gradient.
    "relu": ("tp", {"ffn_activation": "relu", "steps": 1}),
    "geglu": ("sp", {"ffn_activation": "geglu"}),
    # Explicit gates.
    "headwise": ("tp pp dp sp sp+full dp+distributed", HEADWISE),
    "elementwise": ("tp pp dp sp pp+full", ELEMENTWISE),
    "microbatch": ("sp", HEADWISE | {"head_balance_scope": "microbatch"}),
    "headwise-one-group": ("sp", HEADWISE | {"num_query_groups": 1}),
    "elementwise-one-group": ("tp", ELEMENTWISE | {"num_query_groups": 1}),
    "ns-bias-qk-norm": (
        "sp",
        ELEMENTWISE | QK_NORM | {"gate_activation": "ns-sigmoid", "add_qkv_bias": True},
    ),
    "shared-gate": ("tp", ELEMENTWISE | {"gate_shared_heads": True, "gate_activation": "silu"}),
    "added": ("tp", ELEMENTWISE | {"gate_operation": "add", "gate_activation": "silu"}),
    "parameter": ("tp", ELEMENTWISE | {"gate_input": "none"}),
    "value": ("tp", HEADWISE | {"gate_position": "value"}),
    "value-shared": ("sp", ELEMENTWISE | {"gate_position": "value", "gate_shared_heads": True}),
    "key": ("tp", ELEMENTWISE | QK_NORM | {"gate_position": "key"}),
    "query": ("tp", ELEMENTWISE | QK_NORM | {"gate_position": "query"}),
    "output": ("tp sp", ELEMENTWISE | {"gate_position": "output", "add_qkv_bias": True}),
    "output-parameter": ("sp", ELEMENTWISE | {"gate_position": "output", "gate_input": "none"}),
    "rmsnorm": ("tp", HEADWISE | {"sdpa_output_norm": "rmsnorm"}),
    "silu": ("tp", VANILLA | {"sdpa_output_norm": "silu"}),
    # Switch heads. All experts are selected: rounding decides between two of nearly equal scores.
    "switch-value": ("tp sp+full pp", {"switch_heads": "value"} | EXPERTS),
    "switch-key-value": ("sp", {"switch_heads": "key-value", "add_qkv_bias": True} | EXPERTS),
}


@pytest.fixture(scope="module")
def single(pool):
    """The report of one process for a model."""
    return lambda model: pool.once(TRAIN, SINGLE, **MODELS[model][1])


@pytest.mark.parametrize(("model", "where"), cases(MODELS))
def test_layout_changes_nothing(pool, single, model, where):
    layout, options = case(where)
    reports = pool.run(TRAIN, layout, **MODELS[model][1] | options)
    merging.assert_same_training(reports, single(model), TOLERANCE)


def test_interleaved_stages_whose_messages_are_sent_in_batches(pool, single):
    """Megatron-Core's default, in which two stages on two ranks would exchange their messages."""
    batched = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    found = pool.run(TRAIN, VPP, **MODELS["four-layers"][1], **batched)
    merging.assert_same_training(found, single("four-layers"), TOLERANCE)


@pytest.mark.parametrize("batched", [False, True])
def test_shapes_of_messages_of_two_stages(pool, batched):
    """Where sequences differ in length, each stage sends the shapes of its messages first."""
    (first, second) = pool.run(f"{TASKS}:messages", PP, batched=batched)
    sent = [{"forward": [10 + r, 1, 4], "backward": [20 + r, 1, 4]} for r in (0, 1)]
    assert [first, second] == [
        {"previous": theirs["forward"], "next": theirs["backward"]} for theirs in reversed(sent)
    ]


@pytest.mark.parametrize("options", [FULL, SELECTIVE], ids=["full", "selective"])
def test_recompute_runs_attention_twice(pool, single, options):
    # Otherwise the cases above would compare a run with itself.
    (report,) = pool.run(TRAIN, SINGLE, steps=1, **options)
    assert 3 * report["forward_calls"][0] == 2 * single("sink")[0]["forward_calls"][0]


def test_the_balance_loss_matters_for_what_is_compared(pool, single):
    # 1e-5 of a gradient in which the balance loss is invisible would prove nothing.
    (_, headwise), (_, elementwise) = MODELS["headwise"], MODELS["elementwise"]
    step = {"head_balance_scope": "microbatch", "steps": 1}
    for models, parameters in (
        (
            [single("sink"), single("no-balance")],
            ("linear_qkv.weight", "core_attention.softmax_of"),
        ),
        ([pool.run(TRAIN, SINGLE, **step | headwise | o) for o in ({}, OFF)], ("linear_gate.we",)),
        (
            [pool.run(TRAIN, SINGLE, **step | elementwise | o) for o in ({}, OFF)],
            ("linear_qkv.we",),
        ),
    ):
        with_loss, without = (merging.whole([report["gradients"]]) for (report,) in models)
        for name in parameters:
            keys = [key for key in with_loss if f"layers.0.self_attention.{name}" in key]
            assert keys
            for key in keys:
                assert merging.relative_error(without[key], with_loss[key]) > 0.05, key


def test_vanilla_importance_is_measured_without_a_balance_loss_too(single):
    found, wanted = (
        single(model)[0]["statistics"][0] for model in ("vanilla-no-balance", "vanilla")
    )
    # Two formulas of the gate: one of them loses gates below 1e-6 to rounding.
    np.testing.assert_allclose(found["importance_LH"], wanted["importance_LH"], rtol=1e-4)
    assert found["balance_loss"] == 0 < wanted["balance_loss"]


def test_per_token_loss_has_the_gradient_of_the_mean_loss(single):
    merging.assert_same_gradients(single("per-token-loss"), single("sink"), TOLERANCE)


@pytest.mark.parametrize("layout", [SINGLE, PP], ids=str)
def test_a_loss_scale_multiplies_every_gradient(pool, layout):
    """As fp16's: the balance loss is scaled with the loss, microbatch by microbatch."""
    scale = 1024.0  # a power of two: no rounding
    # The unscaled norm would be clipped against the scaled one: one step. The global scope would
    # have no gradient in it.
    options = {"head_balance_scope": "microbatch", "steps": 1}
    found = pool.run(TRAIN, layout, grad_scale=scale, **options)
    wanted = pool.once(TRAIN, SINGLE, **options)
    merging.assert_same_gradients(found, wanted, TOLERANCE, scale=scale)


def test_fp16_gradients_do_not_depend_on_the_loss_scale(pool):
    """The real path: Float16Module, a gradient scaler, unscaling in the optimizer."""
    norms, options = [], {"head_balance_scope": "microbatch", "steps": 1}
    (float32,) = pool.once(TRAIN, SINGLE, **options)
    for scale in (2.0**4, 2.0**12):
        fp16 = {"fp16": True, "optimizer_options": {"initial_loss_scale": scale}}
        (report,) = pool.run(TRAIN, SINGLE, **fp16, **options)
        norms.append(report["grad_norm"][0])
    # Three digits of fp16; a balance loss that is not scaled would be 256 times off.
    assert norms[0] == pytest.approx(norms[1], rel=3e-3)
    assert norms[0] == pytest.approx(float32["grad_norm"][0], rel=1e-2)
