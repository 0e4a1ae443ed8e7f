"""Switch heads (P1.39): the sum of experts and a whole layer against their definitions.

Layouts and checkpoints: tests/distributed/test_layouts.py and test_checkpoint.py.
"""

import numpy as np
import pytest
import torch

from megasink.attention import reference_switch
from megasink.megatron.switch_heads import sum_of_experts
from tests.distributed.layout import SINGLE, Layout

TASKS = "tests.megatron.switch_tasks"
VALUE, BOTH = {"switch_heads": "value"}, {"switch_heads": "key-value"}


def of(experts, top_k):
    return {"switch_experts": experts, "switch_top_k": top_k}


# The rows of P1 Table 6, at this size, and what a projection has besides.
LAYERS = {
    "key-value-8-of-8": BOTH | of(8, 8),
    "key-value-4-of-4": BOTH | of(4, 4),
    "value-4-of-4": VALUE | of(4, 4),
    "value-8-of-2": VALUE | of(8, 2),
    "value-1-of-1": VALUE,
    "one-group": BOTH | of(3, 2) | {"num_query_groups": 1},
    "no-groups": VALUE | of(3, 2) | {"num_query_groups": 4},
    "qkv-bias": BOTH | of(3, 1) | {"add_qkv_bias": True},
    "bias": VALUE | of(3, 1) | {"add_bias_linear": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 4), (8, 2), (3, 1)])
def test_the_sum_of_experts_is_its_definition(dtype, experts, top_k):
    generator = torch.Generator().manual_seed(experts)
    expert = torch.randn(7, 3, experts, 5, generator=generator).to(dtype).requires_grad_()
    score = (4 * torch.randn(7, 3, experts, generator=generator)).to(dtype).requires_grad_()
    grad = torch.randn(7, 3, 5, generator=generator).to(dtype)
    out = sum_of_experts(expert, score, top_k)
    assert out.dtype == dtype
    found = (out, *torch.autograd.grad(out, (expert, score), grad))
    wide = reference_switch(expert.double(), score.double(), top_k=top_k)
    wanted = (wide, *torch.autograd.grad(wide, (expert, score), grad.double()))
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


def test_of_equal_scores_the_first_count():
    """bf16 has so few digits that scores are often equal."""
    expert = torch.eye(4).expand(2, 4, 4)
    score = torch.tensor([[1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    found = sum_of_experts(expert, score, 2)
    assert torch.equal(found, reference_switch(expert, score, top_k=2))
    assert (found > 0).tolist() == [[True, True, False, False]] * 2


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_definition(pool, name, bf16):
    """Output and the gradients of input and all weights; sinks of magnitude 5; 23 tokens."""
    if bf16:  # in bf16 another expert may have the highest score
        top_k = LAYERS[name].get("switch_experts", 1)
        options = LAYERS[name] | {"bf16": True, "switch_top_k": top_k}
    else:
        options = LAYERS[name]
    (errors,) = pool.run(f"{TASKS}:against_definition", SINGLE, **options)
    other = errors.pop("with another top k")
    assert max(errors.values()) <= (3e-2 if bf16 else 2e-5), errors
    # Otherwise a wrong choice would not show.
    assert other > 0.05 or name == "value-1-of-1"


def test_one_expert_is_the_headwise_value_gate(pool):
    """The caption of Table 6 says so of its row 6."""
    ((switch, gated),) = pool.run(f"{TASKS}:against_value_gate", SINGLE)
    assert switch.keys() == gated.keys()
    for name, value in switch.items():
        assert np.array_equal(value, gated[name]), name


@pytest.mark.parametrize(
    ("options", "layout", "said"),
    [
        (VALUE | of(4, 5), SINGLE, "switch_top_k 5 of 4 experts: use 1 to 4"),
        (VALUE | of(0, 1), SINGLE, "switch_experts 0: use at least 1"),
        (of(4, 1), SINGLE, "switch_experts 4 has no effect with switch_heads none"),
        (BOTH | {"attention_variant": "gated"}, SINGLE, "attention_variant gated"),
        (VALUE | {"num_query_groups": 1}, Layout(tp=2), "1 key/value groups on tensor_model"),
    ],
    ids=["top-k", "no-experts", "no-switch", "gated", "part-of-a-group"],
)
def test_options_that_contradict_are_refused_by_name(pool, options, layout, said):
    for message in pool.run(f"{TASKS}:refused", layout, **options):
        assert said in message
