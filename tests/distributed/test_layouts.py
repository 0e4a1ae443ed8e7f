"""Loss, statistics, gradients, gradient norm and weights are the same in every layout.

Float32, three steps of Adam through Megatron's schedules; the single process is itself compared
with plain autograd in test_oracle.py. Context parallelism is in test_context_parallel.py, expert
parallelism in test_moe.py, the scopes in test_invariance.py.
"""

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.layout import SINGLE, Layout

TRAIN = "tests.distributed.tiny_gpt:train"
TOLERANCE = 1e-5

TP, TP_SP, PP, DP = Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=2)
VPP = Layout(pp=2, vpp=2)
SP = {"sequence_parallel": True}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
DISTRIBUTED = {"distributed_optimizer": True}

# Options of the model, by name: each has its own oracle, a single process.
MODELS = {
    "sink": {},
    "vanilla": {"attention_variant": "vanilla"},
    "off-by-one": {"attention_variant": "off-by-one"},
    "tied": {"tied": True},
    "per-token-loss": {"calculate_per_token_loss": True},
    "one-group": {"num_query_groups": 1},
    "qk-norm": {"qk_layernorm": True},
    "window": {"window_size": (7, 0), "window_attn_skip_freq": 2},
    "four-layers": {"num_layers": 4},
    "no-balance": {"head_balance_coeff": 0.0},
    "vanilla-no-balance": {"attention_variant": "vanilla", "head_balance_coeff": 0.0},
    "shared": {"head_balance_shared_heads": 1, "head_balance_scope": "microbatch"},
    "k-bias": {"attention_variant": "k-bias", "sink_lr_mult": 3.0},
    "kv-bias-shared": {"attention_variant": "kv-bias", "bias_shared_heads": True},
    "mlp-similarity": {
        "attention_variant": "vanilla",
        "attention_similarity": "mlp",
        # A signed row that cancels to a sum near 1 would multiply the rounding of another layout.
        "attention_normalization": "none",
        "head_balance_coeff": 0.0,
    },
    "layernorm": {"normalization": "LayerNorm", "add_bias_linear": True},
}

CASES = [
    ("sink", TP_SP, SP),
    ("sink", PP, {}),
    ("sink", DP, DISTRIBUTED | {"overlap": True}),
    ("sink", SINGLE, FULL),
    ("sink", SINGLE, SELECTIVE),
    ("sink", TP_SP, SP | FULL),
    ("sink", PP, FULL),
    ("sink", DP, DISTRIBUTED | SELECTIVE),
    ("vanilla", TP_SP, SP | FULL),
    ("vanilla", PP, {}),
    ("off-by-one", TP, {}),
    ("tied", TP_SP, SP),
    ("tied", PP, {}),
    ("tied", DP, DISTRIBUTED),
    ("per-token-loss", PP, {}),
    ("one-group", TP_SP, SP),
    ("qk-norm", TP_SP, SP),
    ("window", TP, {}),
    ("window", PP, {}),
    ("four-layers", VPP, FULL | DISTRIBUTED),
    ("no-balance", TP_SP, SP),
    ("vanilla-no-balance", PP, {}),
    ("shared", TP, {}),
    ("shared", PP, {}),
    ("k-bias", TP_SP, SP | FULL),
    ("k-bias", PP, {}),
    ("kv-bias-shared", TP_SP, SP | SELECTIVE),
    ("kv-bias-shared", PP, {}),
    ("kv-bias-shared", DP, DISTRIBUTED),
    ("mlp-similarity", TP_SP, SP | FULL),
    ("mlp-similarity", PP, {}),
    ("layernorm", TP_SP, SP),
    ("layernorm", PP, {}),
]


@pytest.fixture(scope="module")
def single(pool):
    """The report of one process for a model."""
    return lambda model: pool.once(TRAIN, SINGLE, **MODELS[model])


def name_of(value) -> str | None:
    if isinstance(value, dict):
        return "+".join(k if v is True else f"{k}={v}" for k, v in value.items()) or "plain"
    return str(value)


def compare(reports, expected) -> None:
    """Reports of :func:`tiny_gpt.train` from the ranks of two layouts are the same."""
    merging.assert_same_training(reports, expected, TOLERANCE)


@pytest.mark.parametrize(("model", "layout", "options"), CASES, ids=name_of)
def test_layout_changes_nothing(pool, single, model, layout, options):
    compare(pool.run(TRAIN, layout, **MODELS[model], **options), single(model))


@pytest.mark.parametrize("options", [FULL, SELECTIVE], ids=["full", "selective"])
def test_recompute_runs_attention_twice(pool, single, options):
    # Otherwise the cases above would compare a run with itself.
    (report,) = pool.run(TRAIN, SINGLE, **options)
    assert report["forward_calls"] == [2 * single("sink")[0]["forward_calls"][0]]


def test_the_balance_loss_matters_for_what_is_compared(single):
    # 1e-5 of a gradient in which the balance loss is invisible would prove nothing.
    with_loss, without = (
        merging.whole([single(model)[0]["gradients"]]) for model in ("sink", "no-balance")
    )
    for name in ("layers.0.self_attention.linear_qkv.weight", "core_attention.softmax_offset"):
        for key in (k for k in with_loss if k.endswith(name)):
            assert merging.relative_error(without[key], with_loss[key]) > 0.05, key


def test_vanilla_importance_is_measured_without_a_balance_loss_too(single):
    found, wanted = (
        single(model)[0]["statistics"][0] for model in ("vanilla-no-balance", "vanilla")
    )
    # Two formulas of the gate: one of them loses gates below 1e-6 to rounding.
    np.testing.assert_allclose(found["importance_LH"], wanted["importance_LH"], rtol=1e-4)
    assert found["balance_loss"] == 0 < wanted["balance_loss"]


def test_per_token_loss_has_the_gradient_of_the_mean_loss(single):
    mean, per_token = (
        merging.whole([single(model)[0]["gradients"]]) for model in ("sink", "per-token-loss")
    )
    for name in mean:
        assert merging.relative_error(per_token[name], mean[name]) <= TOLERANCE, name


@pytest.mark.parametrize("layout", [SINGLE, PP], ids=str)
def test_a_loss_scale_multiplies_every_gradient(pool, layout):
    """As fp16's: the balance loss is scaled with the loss, microbatch by microbatch."""
    scale = 1024.0  # a power of two: no rounding
    # The unscaled norm would be clipped against the scaled one: one step. The global scope would
    # have no gradient in it.
    options = {"head_balance_scope": "microbatch", "steps": 1}
    reports = pool.run(TRAIN, layout, grad_scale=scale, **options)
    found = merging.whole([r["gradients"] for r in reports])
    unscaled = pool.run(TRAIN, layout, **options)
    for name, wanted in merging.whole([r["gradients"] for r in unscaled]).items():
        assert merging.relative_error(found[name] / scale, wanted) <= TOLERANCE, name


def test_fp16_gradients_do_not_depend_on_the_loss_scale(pool):
    """The real path: Float16Module, a gradient scaler, unscaling in the optimizer."""
    norms, scope = [], {"head_balance_scope": "microbatch"}
    (float32,) = pool.run(TRAIN, SINGLE, steps=1, **scope)
    for scale in (2.0**4, 2.0**12):
        options = {"fp16": True, "optimizer_options": {"initial_loss_scale": scale}}
        (report,) = pool.run(TRAIN, SINGLE, steps=1, **options, **scope)
        norms.append(report["grad_norm"][0])
    # Three digits of fp16; a balance loss that is not scaled would be 256 times off.
    assert norms[0] == pytest.approx(norms[1], rel=3e-3)
    assert norms[0] == pytest.approx(float32["grad_norm"][0], rel=1e-2)
