"""Models with explicit gates are the same in every layout, and resume in every other.

As test_layouts.py: loss, statistics, gradients, gradient norm and two steps, against one process.
"""

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.layout import SINGLE, Layout
from tests.distributed.test_layouts import (
    DISTRIBUTED,
    FULL,
    SP,
    TOLERANCE,
    TRAIN,
    compare,
    name_of,
)

TP, TP_SP, PP, DP = Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=2)
CHECKPOINT = "tests.distributed.checkpoint_tasks"
BALANCE = 1.0

ELEMENTWISE = {"gate_granularity": "elementwise"}
MODELS = {
    "headwise": {},
    "elementwise": ELEMENTWISE,
    "microbatch": {"head_balance_scope": "microbatch"},
    "one-group": {"num_query_groups": 1},
    "elementwise-one-group": {"num_query_groups": 1, **ELEMENTWISE},
    "ns-bias-qk-norm": {
        "gate_activation": "ns-sigmoid",
        "add_qkv_bias": True,
        "qk_layernorm": True,
        **ELEMENTWISE,
    },
    "shared": {"gate_shared_heads": True, "gate_activation": "silu", **ELEMENTWISE},
    "added": {"gate_operation": "add", "gate_activation": "silu", **ELEMENTWISE},
    "parameter": {"gate_input": "none", **ELEMENTWISE},
    "value": {"gate_position": "value"},
    "value-shared": {"gate_position": "value", "gate_shared_heads": True, **ELEMENTWISE},
    "key": {"gate_position": "key", "qk_layernorm": True, **ELEMENTWISE},
    "query": {"gate_position": "query", "qk_layernorm": True, **ELEMENTWISE},
    "output": {"gate_position": "output", "add_qkv_bias": True, **ELEMENTWISE},
    "output-parameter": {"gate_position": "output", "gate_input": "none", **ELEMENTWISE},
    "rmsnorm": {"sdpa_output_norm": "rmsnorm"},
    "silu": {"attention_variant": "vanilla", "sdpa_output_norm": "silu"},
}
CASES = [
    *((model, layout, {}) for model in ("headwise", "elementwise") for layout in (TP, PP, DP)),
    *((model, TP_SP, SP) for model in ("headwise", "elementwise")),
    ("headwise", TP_SP, SP | FULL),
    ("headwise", DP, DISTRIBUTED),
    ("elementwise", PP, FULL),
    ("microbatch", TP_SP, SP),
    ("one-group", TP_SP, SP),
    ("elementwise-one-group", TP, {}),
    ("ns-bias-qk-norm", TP_SP, SP),
    ("shared", TP, {}),
    ("added", TP, {}),
    ("parameter", TP, {}),
    ("value", TP, {}),
    ("value-shared", TP_SP, SP),
    ("key", TP, {}),
    ("query", TP, {}),
    ("output", TP, {}),
    ("output", TP_SP, SP),
    ("output-parameter", TP_SP, SP),
    ("rmsnorm", TP, {}),
    ("silu", TP, {}),
]


def options_of(model: str) -> dict:
    return {"attention_variant": "gated", "head_balance_coeff": BALANCE} | MODELS[model]


@pytest.fixture(scope="module")
def single(pool):
    """The report of one process for a model."""
    return lambda model: pool.once(TRAIN, SINGLE, **options_of(model))


@pytest.mark.parametrize(("model", "layout", "options"), CASES, ids=name_of)
def test_layout_changes_nothing(pool, single, model, layout, options):
    reports = pool.run(TRAIN, layout, **options_of(model), **options)
    compare(reports, single(model))


@pytest.mark.parametrize("model", ["headwise", "elementwise"])
def test_the_balance_loss_matters_for_what_is_compared(pool, model):
    options = {**options_of(model), "head_balance_scope": "microbatch", "steps": 1}
    reports = [
        pool.run(TRAIN, SINGLE, **options | {"head_balance_coeff": coeff})
        for coeff in (0.0, BALANCE)
    ]
    found, wanted = (merging.whole([r["gradients"] for r in rs]) for rs in reports)
    rows = "linear_gate" if model == "headwise" else "linear_qkv"
    for layer in (0, 1):
        name = f"decoder.layers.{layer}.self_attention.{rows}.weight"
        assert merging.relative_error(found[name], wanted[name]) > 0.05, name


@pytest.mark.parametrize(
    ("model", "saved_under", "layout", "distributed"),
    [
        ("headwise", TP, SINGLE, True),
        ("headwise", TP, PP, True),
        ("headwise", SINGLE, TP, False),
        ("ns-bias-qk-norm", TP, SINGLE, True),
        ("ns-bias-qk-norm", PP, TP, False),
        ("parameter", TP, PP, True),
        ("output", TP, SINGLE, True),
        ("rmsnorm", SINGLE, TP, True),
    ],
    ids=str,
)
def test_checkpoint_resumes_under_another_layout(
    pool, tmp_path, model, saved_under, layout, distributed
):
    options = options_of(model) | {"distributed_optimizer": distributed}
    folder = str(tmp_path)
    before = pool.run(f"{CHECKPOINT}:save_and_go_on", saved_under, folder=folder, **options)
    after = pool.run(f"{CHECKPOINT}:load_and_go_on", layout, folder=folder, **options)
    assert set(before[0]["saved"]) == set(after[0]["saved"])
    assert len(before[0]["saved"]) == (4 if distributed else 1)
    for kind in before[0]["saved"]:
        found, wanted = (merging.whole([r["saved"][kind] for r in rs]) for rs in (after, before))
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=f"{kind} of {name}")
    np.testing.assert_allclose(merging.loss(after), merging.loss(before), rtol=TOLERANCE)
    found, wanted = (merging.whole([r["after"] for r in rs]) for rs in (after, before))
    for name in wanted:
        assert merging.relative_error(found[name], wanted[name]) <= TOLERANCE, name
