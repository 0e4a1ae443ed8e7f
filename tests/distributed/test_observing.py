"""What is recorded on observed steps and in evaluations is the same in every layout, and right."""

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.layout import SINGLE, Layout

TASKS = "tests.distributed.observing_tasks"
MICROBATCH = {"head_balance_scope": "microbatch"}
TP_SP, PP, DP, CP = Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=2), Layout(cp=2)
LAYOUTS = [SINGLE, TP_SP, PP, DP, CP]
SERIES = ("sink", "gate", "balance gradient", "other gradient")
# Both gradients are of one size then; the defaults give a ratio of 1e-3 and less.
COEFF = 1.0


@pytest.fixture(scope="module")
def defined(pool):
    """By autograd, once."""
    return pool.run(f"{TASKS}:definition", SINGLE, coeff=COEFF)[0]


def relative(found, wanted):
    return merging.relative_error(np.asarray(found), np.asarray(wanted))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_and_sinks_are_those_of_autograd(pool, defined, layout):
    options = MICROBATCH | {"head_balance_coeff": COEFF}
    reports = [
        report
        for kind in kinds_of(layout)
        for report in pool.run(f"{TASKS}:observed_step", layout, **options, **kind)
    ]
    for report in reports:  # the last rank writes, every rank knows
        assert np.array_equal(report["sink"], defined["sink"])
        assert np.isnan(report["gate"]).all()
        for name in ("balance gradient", "other gradient"):
            assert relative(report[name], defined[name]) < 1e-5, name
        # 2 layers of 4 heads: 2 H + 3 numbers, and 2 H for each of four series on observed steps
        assert report["sizes"] == [2 * (2 * 4 + 3), 2 * (2 * 4 + 3 + 4 * 2 * 4)]
    assert relative(defined["other gradient"][1], defined["language"][1]) < 1e-5  # nothing behind
    assert relative(defined["other gradient"][0], defined["language"][0]) > 1e-3


def kinds_of(layout):
    """Options of a layout: both ways to divide a sequence."""
    if layout.cp == 1:
        return [{"sequence_parallel": layout.sp}]
    return [{"cp_comm_type": kind} for kind in ("all_gather", "a2a")]


@pytest.mark.parametrize("variant", ["vanilla", "kv-bias"])
def test_gradients_of_other_variants_do_not_depend_on_the_layout(pool, variant):
    """One layer of each is compared with autograd in test_the_gradients_of_a_layer."""
    options = MICROBATCH | {"attention_variant": variant}
    (single,) = pool.run(f"{TASKS}:observed_step", SINGLE, **options)
    for layout in [CP, TP_SP] if variant == "vanilla" else [CP]:
        for kind in kinds_of(layout):
            for report in pool.run(f"{TASKS}:observed_step", layout, **options, **kind):
                for name in ("balance gradient", "other gradient"):
                    assert relative(report[name], single[name]) < 1e-5, (layout, kind, name)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"attention_variant": "vanilla", "attention_scale_alpha": 0.5},
        {"attention_variant": "v-bias"},
        {"attention_variant": "kv-bias", "bias_shared_heads": True},
        {
            "attention_variant": "k-bias",
            "bias_fixed_value": "uniform",
            "bias_fixed_value_norm": 5.0,
        },
    ],
    ids=lambda o: o["attention_variant"],
)
def test_the_gradients_of_a_layer(pool, options, packed):
    (found,) = pool.run(f"{TASKS}:layer_gradients", SINGLE, packed=packed, **options)
    for name in ("balance gradient", "other gradient"):
        assert relative(found[name], found[f"defined {name}"]) < 1e-5, name
        assert np.abs(found[f"defined {name}"]).min() > 0


@pytest.mark.parametrize("layout", [TP_SP, PP, CP], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"attention_variant": "gated", "gate_input": "none"},
        {"attention_variant": "gated", "gate_input": "none", "gate_granularity": "elementwise"},
        # Of samples with padding, which counts nowhere.
        {"attention_variant": "gated", "gate_input": "none", "documents": True},
        {"attention_variant": "sink", "documents": True},
    ],
    ids=["headwise", "elementwise", "headwise-packed", "sink-packed"],
)
def test_both_gradients_add_up_to_that_of_the_parameter(pool, layout, options):
    """A gate that is a parameter is the bias itself, and so is a sink but for its sign."""
    reports = [
        report
        for kind in kinds_of(layout)
        for report in pool.run(f"{TASKS}:observed_step", layout, **MICROBATCH, **options, **kind)
    ]
    for report in reports:
        assert report["parameter"]
        total_LH = np.asarray(report["balance gradient"]) + np.asarray(report["other gradient"])
        for layer, first, gradient in report["parameter"]:
            assert relative(total_LH[layer, first : first + len(gradient)], gradient) < 1e-5


@pytest.mark.parametrize(
    ("position", "heads"), [("value", 2), ("key", 2), ("query", 4), ("output", 1)]
)
def test_a_gate_that_is_not_the_importance_is_recorded_beside_it(pool, position, heads):
    options = {"attention_variant": "gated", "gate_position": position}
    if position == "output":
        options["gate_granularity"] = "elementwise"
    (single,) = pool.run(f"{TASKS}:observed_step", SINGLE, **options)
    gate_LH = np.asarray(single["gate"])
    assert np.isnan(gate_LH).tolist() == [[False] * heads + [True] * (4 - heads)] * 2
    known = gate_LH[:, :heads]
    assert ((known > 0) & (known < 1)).all()
    assert np.ptp(known) > 0.01
    for layout in [TP_SP, PP, DP] if position == "value" else [TP_SP]:
        parallel = options | {"sequence_parallel": layout.sp}
        for report in pool.run(f"{TASKS}:observed_step", layout, **parallel):
            np.testing.assert_allclose(report["gate"], gate_LH, rtol=1e-5)


def test_where_the_loss_is_off_there_is_no_ratio(pool):
    (report,) = pool.run(f"{TASKS}:observed_step", SINGLE, head_balance_coeff=0.0)
    assert np.isnan(report["balance gradient"]).all()
    assert np.isnan(report["other gradient"]).all()
    assert not np.isnan(report["sink"]).any()


# Attention of a random model is spread out: (options, epsilon that some heads exceed, layouts).
RATES = {
    "vanilla": ({"init_method_std": 0.45}, 0.08, [TP_SP]),
    "sink": ({"init_method_std": 0.1}, 0.3, [TP_SP, PP, DP]),
    "k-bias": ({"init_method_std": 0.2}, 0.08, [TP_SP]),
    "alibi": (
        {"attention_variant": "vanilla", "attention_bias_type": "alibi", "init_method_std": 0.45},
        *(0.08, [TP_SP]),
    ),
    "window": (
        {
            **{"attention_variant": "vanilla", "init_method_std": 0.45},
            **{"window_size": (40, 0), "window_attn_skip_freq": 2},
        },
        *(0.08, [TP_SP]),
    ),
}


@pytest.mark.parametrize("case", RATES)
def test_sink_rates_are_those_of_the_definition(pool, case):
    options, epsilon, layouts = RATES[case]
    options = {"attention_variant": case, "sequence": 70, "epsilon": epsilon} | options
    variant = options["attention_variant"]
    (wanted,) = pool.run(f"{TASKS}:defined_sink_rates", SINGLE, **options)
    assert 0 < np.mean(wanted["first" if variant == "vanilla" else "slot"]) < 1
    for layout in [SINGLE, *layouts]:
        parallel = options | {"sequence_parallel": layout.sp}
        for report in pool.run(f"{TASKS}:sink_rates", layout, **parallel):
            np.testing.assert_array_equal(report["first"], wanted["first"])
            if variant == "vanilla":
                assert np.isnan(report["slot"]).all()
            else:
                np.testing.assert_array_equal(report["slot"], wanted["slot"])
            assert report["left"] == 0
