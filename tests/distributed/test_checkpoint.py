"""A checkpoint saved under one layout loads under another: weights, optimizer, next step."""

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.cases import TOLERANCE, TP, case
from tests.distributed.layout import SINGLE
from tests.distributed.test_layouts import MODELS
from tests.distributed.test_masks import MODELS as MASKED
from tests.distributed.test_moe import MODELS as MOE

TASKS = "tests.distributed.checkpoint_tasks"
KV_BIAS = {"attention_variant": "kv-bias"}
BF16, DISTRIBUTED = {"bf16": True}, {"distributed_optimizer": True}
# Model, options, the layout that saved it, those that load it. The first five make pairs of an
# optimizer, a type and a layout.
SINK, EXPERTS = MODELS["sink"][1], MOE["shared"][1]
HEADWISE, GATED = MODELS["headwise"][1], MODELS["ns-bias-qk-norm"][1]
SAVED = {
    "sink": (SINK | DISTRIBUTED, "tp", "tp pp single dp"),
    "sink-bf16": (SINK | DISTRIBUTED | BF16, "tp", "tp dp"),
    "sink-plain": (SINK, "tp", "pp dp"),
    "sink-plain-bf16": (SINK | BF16, "tp", "tp single"),
    "sink-dp-bf16": (SINK | DISTRIBUTED | BF16, "dp", "pp dp"),
    "kv-bias-bf16": (KV_BIAS | DISTRIBUTED | BF16 | {"sink_lr_mult": 3.0}, "tp", "tp single"),
    "k-bias-plain-bf16": ({"attention_variant": "k-bias"} | BF16, "tp", "tp single"),
    "headwise-bf16": (HEADWISE | DISTRIBUTED | BF16, "tp", "tp single"),
    "kv-bias-shared": (MODELS["kv-bias-shared"][1] | DISTRIBUTED, "tp", "tp pp"),
    "mlp": (MODELS["mlp-similarity"][1] | DISTRIBUTED, "tp", "tp single"),
    "t5": (MASKED["t5"][1] | DISTRIBUTED, "tp", "pp"),
    "t5-plain-bf16": (MASKED["t5"][1] | BF16, "tp", "tp single"),
    "sandwich": (MODELS["sandwich"][1] | DISTRIBUTED, "tp", "pp"),
    "addition": (MODELS["addition"][1] | DISTRIBUTED, "tp", "pp"),
    "headwise": (HEADWISE | DISTRIBUTED, "tp", "pp single"),
    "ns-bias-qk-norm": (GATED | DISTRIBUTED, "tp", "single"),
    "ns-bias-qk-norm-plain": (GATED, "pp", "tp"),
    "elementwise-one-layer": (
        MODELS["elementwise"][1] | {"attention_variant_layers": [1, 0]} | DISTRIBUTED,
        "tp",
        "pp",
    ),
    "switch": (MODELS["switch-key-value"][1] | DISTRIBUTED, "tp", "pp single"),
    "switch-plain-bf16": (MODELS["switch-value"][1] | BF16, "tp", "single"),
    "headwise-plain": (HEADWISE, "dp", "tp"),
    "prediction": ({"mtp_num_layers": 1} | DISTRIBUTED, "tp", "pp"),
    "parameter": (MODELS["parameter"][1] | DISTRIBUTED, "tp", "pp"),
    "output": (MODELS["output"][1] | DISTRIBUTED, "tp", "single"),
    "rmsnorm": (MODELS["rmsnorm"][1] | DISTRIBUTED, "single", "tp"),
    "experts": (EXPERTS | DISTRIBUTED, "ep", "single"),
    "experts-plain": (EXPERTS, "ep", "single tp-ep"),
    "experts-bf16": (EXPERTS | BF16, "ep", "single"),
    "experts-single": (EXPERTS | DISTRIBUTED, "single", "ep"),
    "experts-single-bf16": (EXPERTS | BF16, "single", "ep"),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_loads_under_another_layout(pool, tmp_path, name):
    options, saved_under, others = SAVED[name]
    options = {"distributed_optimizer": False, "folder": str(tmp_path), **options}
    before = pool.run(f"{TASKS}:save_and_go_on", case(saved_under)[0], **options)
    weights, next_weights = (
        merging.whole(parts)
        for parts in ([r["saved"]["weights"] for r in before], [r["after"] for r in before])
    )
    # Otherwise the comparison of the next step would pass without an optimizer.
    moved = [merging.relative_error(next_weights[n], weights[n]) for n in weights]
    assert np.median(moved) > 1e-4  # in bf16 the norms, near 1, are too coarse for a step
    assert sum(".experts.local_experts." in n for n in weights) == 16 * ("experts" in name)
    # bf16 activations are rounded differently under another layout: 3 digits.
    tolerance = 1e-2 if "bf16" in options else TOLERANCE
    for other in others.split():
        layout, of_layout = case(other)
        after = pool.run(f"{TASKS}:load_and_go_on", layout, **options | of_layout)
        assert [r["step"] for r in after] == [2] * layout.world
        kinds = set(before[0]["saved"]) & set(after[0]["saved"])
        # Where a rank holds the states of one optimizer whole.
        if options["distributed_optimizer"] and not {"dp", "ep"} & {saved_under, other}:
            assert kinds == {"weights", "param", "exp_avg", "exp_avg_sq"}
        for kind in kinds:
            found, wanted = (
                [{kind: r["saved"][kind]} for r in reports] for reports in (after, before)
            )
            merging.assert_same_weights(found, wanted, 0.0, kind)
            of_biases = [
                shard["tensor"].any()
                for part in found
                for parameter, shard in part[kind].items()
                if parameter.endswith("relative_bias.weight")
            ]
            assert all(of_biases)
            assert bool(of_biases) == name.startswith("t5")
        np.testing.assert_allclose(merging.loss(after), merging.loss(before), rtol=tolerance)
        # The same layout goes on to the bit.
        limit = 0.0 if other == saved_under else tolerance
        merging.assert_same_weights(after, before, limit, "after")


def test_names_in_a_checkpoint(pool):
    """They do not tell how the options of the block are implemented."""
    (keys,) = pool.run(
        "tests.megatron.layer_tasks:checkpoint_keys",
        SINGLE,
        sandwich_norm=True,
        multi_head_addition=True,
    )
    new = {k: v for k, v in keys.items() if "post_" in k or "linear_proj" in k}
    assert new == {
        **{f"decoder.layers.{n}.post_self_attn_layernorm.weight": (64,) for n in (0, 2)},
        **{f"decoder.layers.{n}.post_mlp_layernorm.weight": (64,) for n in (1, 3)},
        **{f"decoder.layers.{n}.self_attention.linear_proj.weight": (64, 16) for n in (0, 2)},
    }
    assert not [k for k in keys if "bda" in k]


@pytest.mark.parametrize("layout", [SINGLE, TP], ids=str)
def test_megatrons_own_checkpoint_of_an_output_gate_loads_unchanged(pool, layout, tmp_path):
    reports = pool.run(f"{TASKS}:megatrons_checkpoint", layout, folder=str(tmp_path))
    ours, theirs = ([{"weights": r[kind]} for r in reports] for kind in ("ours", "theirs"))
    merging.assert_same_weights(ours, theirs, 0.0, "weights")
    assert 4 < merging.loss(reports)[0] < 20


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_a_checkpoint_of_megatrons_gpt_model_goes_on_as_a_hybrid(pool, tmp_path, distributed):
    """With its optimizer's states; under the same layout to the bit."""
    options = {"distributed_optimizer": distributed, "folder": str(tmp_path)}
    options |= {"attention_variant": "vanilla", "head_balance_coeff": 0.0}
    wanted = pool.run(f"{TASKS}:save_as_megatron", SINGLE, **options)
    for layout, tolerance in ((SINGLE, 0.0), (TP, TOLERANCE)):
        found = pool.run(f"{TASKS}:load_into_a_hybrid", layout, pattern="*-*-", **options)
        assert {report["step"] for report in found} == {2}
        np.testing.assert_allclose(merging.loss(found), merging.loss(wanted), rtol=tolerance)


def test_layers_of_multi_token_prediction_have_the_names_of_a_gpt_model(pool):
    (keys,) = pool.run(f"{TASKS}:prediction_keys", SINGLE)
    of_gpt = "optimizer.state.exp_avg.mtp.layers.0.transformer_layer."
    names = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
    assert keys == [of_gpt + name for name in names]
