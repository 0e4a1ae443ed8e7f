"""LoRA by its definition, the same in every layout, with nothing kept for the frozen base."""

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.cases import DISTRIBUTED, FULL, SP, TOLERANCE, name_of
from tests.distributed.layout import SINGLE, Layout

TASKS = "tests.lora.tasks"
LORA = {"lora_rank": 4, "lora_alpha": 6.0, "head_balance_shared_heads": 1}
VANILLA = LORA | {"attention_variant": "vanilla"}
SINKS = LORA | {"attention_variant": "sink", "lora_train": ["sinks"]}
QUERY_KEY = LORA | {"attention_variant": "sink", "lora_targets": ["k_proj", "q_proj"]}
HEADWISE = LORA | {"attention_variant": "gated", "lora_train": ["gates"]}
ELEMENTWISE = HEADWISE | {"gate_granularity": "elementwise"}
OVERLAPPED = DISTRIBUTED | {"overlap": True}
PER_TOKEN = {"masked": True, "calculate_per_token_loss": True}
CASES = [
    (VANILLA, Layout(tp=2), {}),
    (SINKS, Layout(tp=2, sp=True), SP | FULL),
    (VANILLA, Layout(pp=2), FULL),
    (QUERY_KEY, Layout(cp=2), {}),
    (VANILLA, Layout(dp=2), OVERLAPPED | PER_TOKEN),
    (HEADWISE, Layout(tp=2, sp=True), SP | DISTRIBUTED),
    (ELEMENTWISE, Layout(tp=2), {}),
]
OF_LAYOUT = {*SP, *FULL, *OVERLAPPED}


@pytest.mark.parametrize(("model", "layout", "options"), CASES, ids=name_of)
def test_two_ranks_equal_one(pool, model, layout, options):
    alike = model | {k: v for k, v in options.items() if k not in OF_LAYOUT}
    wanted = pool.once(f"{TASKS}:train", SINGLE, **alike)
    found = pool.run(f"{TASKS}:train", layout, **model | options)
    merging.assert_same_training(found, wanted, TOLERANCE)
    gradients = merging.whole([wanted[0]["gradients"]])
    assert all(np.abs(gradient).max() > 0 for gradient in gradients.values())


def test_full_recompute_reaches_the_first_layer(pool):
    """Its input, the frozen embedding's output, needs no gradient by itself."""
    plain, recomputed = (
        pool.run(f"{TASKS}:train", SINGLE, steps=1, **VANILLA, **options) for options in ({}, FULL)
    )
    merging.assert_same_gradients(recomputed, plain, TOLERANCE)
    assert any(".layers.0." in name for name in plain[0]["gradients"])


def test_the_balance_loss_reaches_query_and_key(pool):
    """P0.23, with a frozen vanilla model: the coefficient matters for A and B of q_proj, k_proj."""
    gradients = [
        merging.whole([report["gradients"]])
        for coefficient in (0.0, 1.0)
        for report in pool.run(
            f"{TASKS}:train",
            SINGLE,
            **VANILLA | {"head_balance_shared_heads": int(coefficient)},
            steps=2,
            head_balance_coeff=coefficient,
            head_balance_scope="microbatch",
        )
    ]
    for name in ("q_proj.lora_A", "q_proj.lora_B", "k_proj.lora_A", "k_proj.lora_B"):
        key = f"decoder.layers.1.self_attention.linear_qkv.lora.{name}"
        assert merging.relative_error(gradients[1][key], gradients[0][key]) > 1e-3


@pytest.mark.parametrize(
    ("linear", "targets"),
    [
        ("self_attention.linear_qkv", ["q_proj", "k_proj", "v_proj"]),
        ("self_attention.linear_qkv", ["v_proj"]),
        ("self_attention.linear_proj", ["o_proj"]),
        ("mlp.linear_fc1", ["gate_proj", "up_proj"]),
        ("mlp.linear_fc1", ["up_proj"]),
        ("mlp.linear_fc2", ["down_proj"]),
    ],
)
def test_a_layer_is_its_definition_in_float64(pool, linear, targets):
    (found,) = pool.run(
        f"{TASKS}:layer_and_definition", SINGLE, linear=linear, targets=targets, alpha=7.0
    )
    np.testing.assert_allclose(found["output"], found["wanted"], rtol=1e-11, atol=1e-11)
    pairs = zip(found["gradients"], found["wanted_gradients"], strict=True)
    for gradient, wanted in pairs:
        np.testing.assert_allclose(gradient, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("distributed", [False, True])
def test_the_base_has_neither_gradients_nor_optimizer_states(pool, distributed):
    (found,) = pool.run(f"{TASKS}:memory", SINGLE, distributed=distributed, **VANILLA)
    # r * (inputs + outputs) of q, k, v, o, gate, up and down in two layers.
    sizes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    wanted = 2 * 4 * sum(map(sum, sizes))
    assert found["trained"] == wanted
    assert found["all"] > 5 * wanted
    # The distributed optimizer pads its buffers.
    assert wanted <= found["gradients"] <= wanted + 1024
    assert wanted <= found["states"] <= wanted + 1024


def test_dropout_differs_between_targets_and_is_off_in_evaluation(pool):
    plain, dropped = (
        pool.run(f"{TASKS}:train", Layout(tp=2, sp=True), **SP, steps=2, **VANILLA, lora_dropout=p)
        for p in (0.0, 0.5)
    )
    losses = [merging.loss(reports) for reports in (plain, dropped)]
    assert losses[0][0] != losses[1][0]
    # Replicated matrices stay the same on both ranks: `whole` compares them to the bit.
    assert merging.whole([report["final"] for report in dropped])
