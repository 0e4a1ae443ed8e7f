"""Hybrid models: layers that GPT models lack, in every layout; numbers of layers; the probe."""

import numpy as np
import pytest

from megasink.checkpoints.layer_keys import as_gpt_keys, pattern_in
from megasink.megatron.hybrid_pattern import blocks_of, heads_apart, with_heads
from tests.distributed import merging
from tests.distributed.cases import TOLERANCE, TRAIN, name_of
from tests.distributed.layout import SINGLE, Layout
from tests.distributed.pool import TaskFailed

MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# A stage without attention, and one without delta-net.
OF_DELTA_NET = [("G-|*-", Layout(pp=2)), ("G-*-", Layout(tp=2)), ("G-*-", Layout(cp=2))]


@pytest.mark.parametrize(("pattern", "layout"), OF_DELTA_NET, ids=name_of)
def test_no_layout_changes_a_model_with_gated_delta_net(pool, pattern, layout):
    options = DELTA_NET | {"head_balance_scope": "global"}
    found = pool.run(TRAIN, layout, pattern=pattern, **options)
    # In deterministic mode Megatron has torch code of its own on every device.
    wanted = pool.once(TRAIN, SINGLE, pattern="G-*-", deterministic_mode=True, **options)
    # The gradient of dt_bias is a sum over all tokens that nearly cancels: 3e-5 is rounding there.
    # A reduction that is missing is an error of about 1.
    merging.assert_same_training(found, wanted, 10 * TOLERANCE)
    (importance,) = {str(report["statistics"][0]["importance_LH"]) for report in found}
    assert importance.count("nan") == 4  # 4 heads in the block without attention


def test_ranks_that_cannot_share_the_heads_of_delta_net_are_named_before_the_first_step(pool):
    with pytest.raises(TaskFailed, match=r"heads 1 is not a multiple of 1 tensor- x 2 context"):
        pool.run(TRAIN, Layout(cp=2), pattern="G-*-", **DELTA_NET | {"linear_num_key_heads": 1})
    assert heads_apart(2, 4, 2, 1) is heads_apart(None, None, 2, 1) is None
    assert "--linear-num-value-heads 6 " in heads_apart(4, 6, 2, 2)


def test_layers_are_numbered_by_block_through_the_whole_pattern(pool):
    stages = pool.run(
        "tests.megatron.hybrid_tasks:layers_here", Layout(pp=2, vpp=2), pattern="*|-*|*-|-"
    )
    attention, ffn = ("SelfAttention", "IdentityOp"), ("IdentityOp", "MLP")
    assert stages[0] == [[(1, *attention)], [(3, *attention), (3, *ffn)]]
    assert stages[1] == [[(1, *ffn), (2, *attention)], [(4, *ffn)]]


@pytest.mark.parametrize(("pattern", "options"), [("*-*-", {}), ("*E*E", MOE)], ids=name_of)
def test_the_probe_sees_the_blocks_of_a_gpt_model(pool, pattern, options):
    (found,) = pool.run("tests.megatron.hybrid_tasks:probed", SINGLE, pattern=pattern, **options)
    gpt, hybrid = found["gpt"], found["hybrid"]
    assert hybrid["heads"] == gpt["heads"] == [4, 4]
    assert (hybrid["sites"], hybrid["missing"]) == (gpt["sites"], gpt["missing"])
    assert hybrid["places"] == gpt["places"]
    np.testing.assert_array_equal(hybrid["logits"], gpt["logits"])
    for kind in ("layers", "states"):
        assert hybrid[kind].keys() == gpt[kind].keys()
    for key, statistics in gpt["layers"].items():
        assert hybrid["layers"][key].keys() == statistics.keys()
        for name, value in statistics.items():
            np.testing.assert_array_equal(hybrid["layers"][key][name], value, err_msg=name)
    for key, state_TE in gpt["states"].items():
        np.testing.assert_array_equal(hybrid["states"][key], state_TE)


@pytest.mark.parametrize("variant", ["vanilla", "sink", "gated"])
def test_the_probe_reads_latent_attention(pool, variant):
    """Heads with keys of 24 and values of 16; their outputs add up to the branch."""
    (found,) = pool.run(
        "tests.megatron.hybrid_tasks:probed_alone", SINGLE, latent=True, attention_variant=variant
    )
    assert found["heads"] == [4, 4]
    assert found["missing"] == {}
    for layer in found["layers"].values():
        assert layer["key_GTD"].shape == (4, 11, 24)
        assert layer["value_GTD"].shape == (4, 11, 16)
        gated = np.einsum("htd,hde->te", layer["gated_out_HTD"], layer["output_weight_HDE"])
        np.testing.assert_allclose(gated, layer["attention_branch_TE"], rtol=1e-5, atol=1e-5)
        scores = layer["query_HTD"] @ layer["key_GTD"].transpose(0, 2, 1) * 24**-0.5
        weights = np.exp(scores) * np.tri(11)
        row = weights.sum(-1)
        if variant != "sink":
            np.testing.assert_allclose(weights[..., 0] / row, layer["first_weight_HT"], rtol=1e-4)
        out = weights @ layer["value_GTD"]
        direction = (out * layer["out_HTD"]).sum(-1) / np.linalg.norm(out, axis=-1)
        np.testing.assert_allclose(direction, np.linalg.norm(layer["out_HTD"], axis=-1), rtol=1e-4)


def test_blocks_of_other_patterns(pool):
    """A mixer without an FFN, delta-net, and an FFN without a mixer."""
    (found,) = pool.run(
        "tests.megatron.hybrid_tasks:probed_alone", SINGLE, pattern="-*G-*--", **DELTA_NET
    )
    assert found["heads"] == [0, 4, 0, 4, 0]
    assert {layer for _, layer in found["attended"]} == {1, 3}
    assert {layer for _, layer in found["layers"]} == {0, 1, 2, 3, 4}
    states = found["states"]
    assert states.keys() == {(sample, half) for sample in range(2) for half in range(11)}
    np.testing.assert_array_equal(states[0, 0], states[0, 1])  # block 0 has no mixer
    np.testing.assert_array_equal(states[0, 3], states[0, 4])  # block 1 has no FFN
    for half in (2, 3, 5, 6, 7, 8, 10):
        assert np.abs(states[0, half] - states[0, half - 1]).max() > 1e-3


def test_blocks_of_patterns():
    assert blocks_of("*-|*E/*-") == [(0, 1), (2, 3)]
    assert blocks_of("-MG-*--") == [(None, 0), (1, None), (2, 3), (4, 5), (None, 6)]
    assert with_heads("-MG-*--*") == {3: 4, 5: 7}
    assert with_heads("+-+E") == {0: 0, 1: 2}


KEYS = {
    "*": "self_attention.linear_qkv.weight",
    "-": "mlp.linear_fc1.weight",
    "E": "mlp.experts.experts.linear_fc1.weight",
    "M": "mixer.in_proj.weight",
    "G": "self_attention.in_proj.weight",
    "+": "self_attention.linear_kv_down_proj.weight",
}


@pytest.mark.parametrize("pattern", ["*-*-", "*E*-", "M*-G-", "*", "-*", "+-+E"])
def test_patterns_are_read_from_keys(pattern):
    keys = [f"decoder.layers.{n}.{KEYS[symbol]}" for n, symbol in enumerate(pattern)]
    keys += [
        f"decoder.layers.{n}.pre_mlp_layernorm.weight" for n, s in enumerate(pattern) if s == "E"
    ]
    assert pattern_in(["decoder.final_norm.weight", *keys, "output_layer.weight"]) == pattern


def test_keys_of_blocks():
    """Those of GPT models stay, stacked and numbered."""
    hybrid = [f"decoder.layers.{n}.{KEYS[symbol]}" for n, symbol in enumerate("*-*E")]
    assert as_gpt_keys([*hybrid, "decoder.final_norm.weight"]) == {
        hybrid[0]: f"decoder.layers.0.{KEYS['*']}",
        hybrid[1]: f"decoder.layers.0.{KEYS['-']}",
        hybrid[2]: f"decoder.layers.1.{KEYS['*']}",
        hybrid[3]: f"decoder.layers.1.{KEYS['E']}",
        "decoder.final_norm.weight": "decoder.final_layernorm.weight",
    }
    stacked = [f"decoder.layers.{KEYS[symbol]}" for symbol in "*-"]
    of_one = [f"decoder.layers.0.{KEYS[symbol]}" for symbol in "*-"]
    for keys in (stacked, of_one):
        assert pattern_in(keys) is None
        assert as_gpt_keys(keys) == {key: key for key in keys}
