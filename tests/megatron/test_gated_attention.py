"""One gated layer against its definition and against Megatron's own gate; what Megatron sees of it.

The definition: gate_tasks.py here. Layouts: tests/distributed/test_layouts.py, test_checkpoint.py.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megasink.megatron import gate_projection
from tests.distributed.layout import SINGLE, Layout

TASKS = "tests.megatron.gate_tasks"
ELEMENTWISE = {"gate_granularity": "elementwise"}
TOLERANCE = 2e-5

GATES = {
    "default": {},
    "elementwise": ELEMENTWISE,
    "elementwise-bias": {"add_qkv_bias": True, **ELEMENTWISE},
    "bias": {"add_bias_linear": True},
    "one-group": {"num_query_groups": 1},
    "ns-sigmoid": {"gate_activation": "ns-sigmoid"},
    "silu-added": {"gate_operation": "add", "gate_activation": "silu", **ELEMENTWISE},
    "identity-added-headwise": {"gate_operation": "add", "gate_activation": "identity"},
    "silu": {"gate_activation": "silu", **ELEMENTWISE},
    "shared": {"gate_shared_heads": True, **ELEMENTWISE},
    "parameter": {"gate_input": "none", **ELEMENTWISE},
    "parameter-headwise": {"gate_input": "none"},
    "rmsnorm": {"sdpa_output_norm": "rmsnorm"},
    "silu-alone": {"attention_variant": "vanilla", "sdpa_output_norm": "silu"},
    "rmsnorm-alone": {"attention_variant": "vanilla", "sdpa_output_norm": "rmsnorm"},
    "value-rmsnorm": {"gate_position": "value", "sdpa_output_norm": "rmsnorm"},
    "output": {"gate_position": "output", "add_bias_linear": True, **ELEMENTWISE},
    "output-added": {"gate_position": "output", "gate_operation": "add", **ELEMENTWISE},
    "output-parameter": {"gate_position": "output", "gate_input": "none", **ELEMENTWISE},
    **{
        f"{position}-{granularity}-{source}": {
            "gate_position": position,
            "gate_granularity": granularity,
            "gate_input": source,
            "qk_layernorm": granularity == "elementwise",
            "gate_shared_heads": granularity == "elementwise" and source == "hidden",
        }
        for position, granularity, source in itertools.product(
            ("value", "key", "query"), ("headwise", "elementwise"), ("hidden", "none")
        )
    },
}


@pytest.mark.parametrize("name", GATES)
def test_a_gated_layer_is_its_definition(pool, name):
    (errors,) = pool.run(f"{TASKS}:against_definition", SINGLE, **GATES[name])
    matters, spread = errors.pop("without the balance loss"), errors.pop("spread of the gates")
    assert max(errors.values()) <= TOLERANCE, errors
    # Otherwise the comparison would not see the balance loss.
    assert matters > 1e-3 or name == "shared"
    assert spread > 0.01 or name == "shared"


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (SINGLE, {}),
        (SINGLE, {"qk_layernorm": True, "add_qkv_bias": True}),
        (Layout(tp=2), {"num_query_groups": 1}),
    ],
    ids=["plain", "qk-norm-bias", "one-group-on-two-ranks"],
)
def test_the_elementwise_gate_is_megatrons_output_gate(pool, layout, options):
    """From the same weights: each model loads the state of the other, names and shapes included."""
    for ours, theirs in pool.run(f"{TASKS}:upstream", layout, **options):
        assert ours.keys() == theirs.keys()
        for name, wanted in theirs.items():
            scale = np.linalg.norm(wanted)
            assert np.linalg.norm(ours[name] - wanted) <= 1e-5 * scale, name


@pytest.mark.parametrize("name", ["default", "shared", "value-headwise-hidden"])
def test_a_norm_inside_linear_qkv_changes_nothing(pool, name):
    """As TransformerEngine has it; not TransformerEngine itself, which needs CUDA."""
    options = GATES[name] | {"qk_layernorm": False}
    (found,) = pool.run(f"{TASKS}:fused_norm", SINGLE, **options)
    kind = "PositionedGateSelfAttention" if "value" in name else "GatedSelfAttention"
    assert found["attention"] == kind
    assert found["linear_qkv"][0] == "GateRowsNormAndLinear"
    assert "NormAndLinear" in found["linear_qkv"][1:]
    plain, fused = found["plain"], found["fused"]
    for name in plain:
        other = name.replace(
            "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"
        )
        error = np.linalg.norm(fused[other] - plain[name])
        assert error <= 1e-5 * np.linalg.norm(plain[name]), name


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_parameters_as_megatron_sees_them(pool, bf16):
    dtype = "torch.bfloat16" if bf16 else "torch.float32"

    def facts(**options):
        return pool.run(f"{TASKS}:facts", Layout(tp=2), bf16=bf16, **options)[0]

    # 2 groups, 4 heads of 16: 128 rows of q, k and v, half of them and 2 gate rows on each rank,
    # and 6 rows to a multiple of 8, which no checkpoint has.
    found = facts(add_qkv_bias=True)
    assert found["parameters"]["linear_qkv.weight"]["shape"] == (72, 64)
    assert found["parameters"]["linear_qkv.weight"]["decay"] == 0.1
    assert found["parameters"]["linear_qkv.bias"]["shape"] == (72,)
    checkpoint = found["checkpoint"]
    assert checkpoint["linear_qkv.weight"] == (128, 64)
    assert checkpoint["linear_gate.weight"] == (4, 64)
    assert checkpoint["linear_gate.bias"] == (4,)

    found = facts(gate_input="none", sdpa_output_norm="rmsnorm", **ELEMENTWISE)
    for name in ("gate.logit", "output_norm.weight"):
        parameter = found["parameters"][name]
        assert parameter["shape"] == (32,)
        assert parameter["dtype"] == dtype
        assert parameter["sharded"] is True
        assert parameter["decay"] == 0.0
        assert found["checkpoint"][name] == (64,)

    for options in ({"gate_input": "hidden", "add_qkv_bias": True}, {"gate_input": "none"}):
        for sequence_parallel in (False, True):
            found = facts(
                gate_position="output",
                sequence_parallel=sequence_parallel,
                **(ELEMENTWISE | options),
            )
            names = ["gate.logit"]
            if options["gate_input"] == "hidden":
                names = ["linear_gate.weight", "linear_gate.bias"]
            for name in names:
                parameter = found["parameters"][name]
                assert parameter["shape"] == ((64, 64) if "weight" in name else (64,))
                assert parameter["sharded"] is False
                assert parameter["sequence_parallel"] is sequence_parallel
                assert found["checkpoint"][name] == parameter["shape"]


@pytest.mark.parametrize(
    ("options", "with_gate"),
    [
        ({}, [False]),  # the gate is the importance: the kernel runs plainly
        (ELEMENTWISE, [False]),
        ({"gate_position": "value"}, [True]),  # the softmax underneath is
        ({"gate_activation": "silu"}, [True]),
    ],
    ids=["headwise", "elementwise", "value", "silu"],
)
def test_heads_are_counted_once_and_only_where_training_is(pool, options, with_gate):
    (found,) = pool.run(f"{TASKS}:counted", SINGLE, **options)
    assert found == {"evaluation": 0, "no gradients": 0, "training": 1, "with gate": with_gate}


def test_a_gate_of_part_of_a_group_is_refused(pool):
    options = {"gate_position": "key", "num_query_groups": 1}
    messages = pool.run(f"{TASKS}:refused", Layout(tp=2), **options)
    assert "1 groups on 2 ranks" in messages[0]
    assert pool.run(f"{TASKS}:refused", SINGLE, **options) == [""]


@pytest.mark.parametrize(
    ("fp8", "recipe", "rows"),
    [(None, None, 40), ("hybrid", "delayed", 48), ("e4m3", "mxfp8", 64)],
    ids=["bf16", "delayed", "mxfp8"],
)
def test_gate_rows_are_padded_to_what_the_gemms_take(monkeypatch, fp8, recipe, rows):
    """32 rows of query, key and value on a rank, and 4, 8 or 1 of the gate."""

    class Linear:
        def __init__(self, columns, rows, *, config):
            self.weight = torch.nn.Parameter(torch.ones(rows // 2, columns))
            self.bias = None

    for gate in (4, 8, 1):
        monkeypatch.setattr(gate_projection, "trailing_rows", lambda _, gate=gate: 2 * gate)
        config = SimpleNamespace(tensor_model_parallel_size=2, fp8=fp8, fp8_recipe=recipe)
        linear = gate_projection.with_gate_rows(Linear)(8, 64, config=config)
        assert linear.row_split == (32, gate, rows - 32 - gate)
        assert linear.weight.sum() == 8 * (32 + gate)
