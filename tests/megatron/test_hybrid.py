"""Hybrid models: attention and FFN layers equal a GPT model; no layout changes any of it."""

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.cases import FULL, SP, TOLERANCE, TRAIN, name_of
from tests.distributed.layout import SINGLE, Layout

AS_GPT = "tests.megatron.hybrid_tasks:train_as_gpt"
DISTRIBUTED = {"training": {"distributed_optimizer": True}}
GATED = {"attention_variant": "gated", "qk_layernorm": True}
NORMS = {"sandwich_norm": True, "ffn_activation": "geglu"}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
LAYOUT_ONLY = {*SP, *FULL, *DISTRIBUTED}
CASES = [
    ("*-*-", SINGLE, {}),
    ("*-*-", SINGLE, GATED),
    ("*-*-", SINGLE, NORMS),
    ("*E*E", SINGLE, MOE),
    ("*-*-", Layout(tp=2, sp=True), SP | GATED),
    ("*-|*-", Layout(pp=2), FULL | DISTRIBUTED),
    ("*-|*-|*-|*-", Layout(pp=2, vpp=2), {}),
]
DELTA_NET = {
    "deterministic_mode": True,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# A stage without attention, and one without delta-net.
OF_DELTA_NET = [("G-|*-", Layout(pp=2)), ("G-*-", Layout(tp=2)), ("G-*-", Layout(cp=2))]


@pytest.mark.parametrize(("pattern", "layout", "options"), CASES, ids=name_of)
def test_attention_and_ffn_layers_equal_a_gpt_model(pool, pattern, layout, options):
    """Loss, statistics, gradients, the gradient norm, and the weights after three steps."""
    found = pool.run(AS_GPT, layout, pattern=pattern, **options)
    of_model = {key: value for key, value in options.items() if key not in LAYOUT_ONLY}
    wanted = pool.once(TRAIN, SINGLE, num_layers=pattern.count("*"), **of_model)
    # The same operations in the same order: one process is equal to the bit.
    exactly = layout == SINGLE
    merging.assert_same_training(found, wanted, 0.0 if exactly else TOLERANCE)


@pytest.mark.parametrize(("pattern", "layout"), OF_DELTA_NET, ids=name_of)
def test_no_layout_changes_a_model_with_gated_delta_net(pool, pattern, layout):
    options = DELTA_NET | {"head_balance_scope": "global"}
    found = pool.run(TRAIN, layout, pattern=pattern, **options)
    wanted = pool.once(TRAIN, SINGLE, pattern="G-*-", **options)
    # The gradient of dt_bias is a sum over all tokens that nearly cancels: 3e-5 is rounding there.
    # A reduction that is missing is an error of about 1.
    merging.assert_same_training(found, wanted, 10 * TOLERANCE)
    (importance,) = {str(report["statistics"][0]["importance_LH"]) for report in found}
    assert importance.count("nan") == 3 * 4  # 4 heads in each layer that is none of attention


def test_layers_are_numbered_through_the_whole_pattern(pool):
    stages = pool.run(
        "tests.megatron.hybrid_tasks:layers_here", Layout(pp=2, vpp=2), pattern="*|-*|*-|-"
    )
    attention, ffn = ("SelfAttention", "IdentityOp"), ("IdentityOp", "MLP")
    assert stages[0] == [[(1, *attention)], [(4, *attention), (5, *ffn)]]
    assert stages[1] == [[(2, *ffn), (3, *attention)], [(6, *ffn)]]


def test_the_probe_sees_the_layers_that_have_heads(pool):
    """Layer l of the GPT model is layers 2 l and 2 l + 1, so its states are 4 l + 2 and 4 l + 4."""
    (found,) = pool.run("tests.megatron.hybrid_tasks:probed", SINGLE)
    gpt, hybrid = found["gpt"], found["hybrid"]
    assert (gpt["heads"], hybrid["heads"]) == ([4, 4], [4, 0, 4, 0])
    np.testing.assert_array_equal(hybrid["logits"], gpt["logits"])
    for (sample, layer), statistics in gpt["layers"].items():
        of_attention = hybrid["layers"][sample, 2 * layer]
        of_both = of_attention | hybrid["layers"][sample, 2 * layer + 1]
        assert of_both.keys() == statistics.keys()
        assert hybrid["layers"][sample, 2 * layer + 1].keys() == {"mlp_branch_TE"}
        for name, value in statistics.items():
            np.testing.assert_array_equal(of_both[name], value, err_msg=name)
    for (sample, half), state_TE in gpt["states"].items():
        np.testing.assert_array_equal(hybrid["states"][sample, 2 * half], state_TE)
    assert hybrid["sites"] == ["0", "3"]
    assert hybrid["missing"]["mlp0"] == "layer 0 of the hybrid has no FFN"
