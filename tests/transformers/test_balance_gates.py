"""Explicit gates that the head-balance loss in transformers knows, and those it refuses."""

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import megasink
from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.errors import UserError
from megasink.transformers.balance_loss import HeadBalanceLoss
from megasink.transformers.decoder_blocks import check_gated
from tests.analysis.capture.kept import Kept
from tests.transformers.balance_oracle import tokens
from tests.transformers.test_balance import COEFF, model_of, step
from tests.transformers.test_refused import SMALL


def test_the_old_name_of_the_class_warns():
    with pytest.warns(DeprecationWarning, match="HeadBalanceLoss"):
        assert megasink.HeadBalance is HeadBalanceLoss


@pytest.mark.parametrize("name", ["lfm3", "afmoe", "ling-3"])
def test_explicit_gates_need_no_attention_of_ours(name):
    """Ling's linear layers have a g_proj, too, and are no heads of softmax attention."""
    model = model_of(name, torch.float32, implementation="eager")
    balance = HeadBalanceLoss(model, COEFF)
    step(model, [tokens(3)])
    importance_LH = balance.finish_step().importance_LH
    known_L = [layer in balance.layers for layer in range(2)]
    assert (~importance_LH.isnan().any(1)).tolist() == known_L == [name != "ling-3", True]


def test_a_gate_that_is_no_share():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.LagunaConfig(**SMALL, **experts)
    laguna = transformers.LagunaForCausalLM._from_config(config, attn_implementation="sdpa")
    with pytest.raises(UserError, match="LagunaAttention gates its heads by softplus, which may"):
        HeadBalanceLoss(laguna)
    with pytest.raises(UserError, match="LagunaAttention gates its heads by softplus, which may"):
        TransformersProbe(laguna.eval(), Kept({"out_HTD"}))


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "megasink"])
def test_the_first_step_shows_whether_the_gate_is_what_gates(implementation):
    model = model_of("lfm3", torch.float32, implementation)
    output = model.model.layers[1].self_attn.o_proj
    changed = output.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
    balance = HeadBalanceLoss(model, COEFF)
    for _ in range(2):  # a step that fails is not the first
        with pytest.raises(UserError, match="Lfm3Attention changes the outputs of its heads"):
            step(model, [tokens(3)])
        assert not ALL_ATTENTION_FUNCTIONS._local_mapping
    balance.remove()
    changed.remove()
    balance = HeadBalanceLoss(model, COEFF)
    step(model, [tokens(3)])
    output.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))  # not looked at again
    step(model, [tokens(3)])
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping
    assert len(output._forward_pre_hooks) == 1


def test_a_wider_gate_is_compared_in_the_type_of_the_outputs():
    """megasink's modeling file makes float32 gates of a bfloat16 model."""
    out_BHTD = torch.randn(1, 2, 3, 4).bfloat16()
    gate_BHTX = torch.rand(1, 2, 3, 1)
    check_gated(None, (out_BHTD * gate_BHTX).bfloat16(), out_BHTD, gate_BHTX)
    with pytest.raises(UserError, match="changes the outputs of its heads"):
        check_gated(None, out_BHTD, out_BHTD, gate_BHTX)
