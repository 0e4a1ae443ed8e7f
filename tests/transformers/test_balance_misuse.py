"""Misuse of the head-balance loss of models of transformers: each is an error of one line."""

import pytest
import torch
import transformers
from torch import nn

import megasink.transformers  # noqa: F401  registers the attention
from megasink.errors import ConfigError, UserError
from megasink.transformers.balance_loss import HeadBalanceLoss
from tests.transformers.balance_oracle import tokens
from tests.transformers.test_balance import COEFF, model_of, step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coeff": -1.0}, "coeff -1.0 is negative: use 0 or more"),
        ({"coeff": float("nan")}, "coeff nan is not finite: use 0 or more"),
        ({"shared_heads": -1}, "shared_heads -1 is negative"),
        ({"shared_heads": 3}, "shared_heads 3 of 4 heads leaves fewer than two to balance: use at"),
        ({"shared_heads": 1, "refresh": -2}, "refresh -2 is negative"),
        ({"refresh": 2}, "refresh 2 has no effect without shared_heads: set both"),
        ({"scope": "batch"}, "scope 'batch' is unknown: use global, data-parallel, microbatch"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError) as raised:
        HeadBalanceLoss(model_of("llama"), **options)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_all_problems_at_once():
    model = model_of("llama", implementation="eager")
    with pytest.raises(ConfigError) as raised:
        HeadBalanceLoss(model, -1.0, scope="none")
    text = str(raised.value)
    assert "3 problems" in text
    assert "'eager', which provides no gates: import megasink.transformers and call" in text
    assert not hasattr(model, "megasink_balanced")


def test_models_that_cannot_be_balanced():
    linear = model_of("qwen3.5", layer_types=["linear_attention"] * 4)
    with pytest.raises(UserError, match="cannot find attention in the 4 layers"):
        HeadBalanceLoss(linear)
    bypassing = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(ConfigError, match="bypasses transformers' attention interface, so"):
        HeadBalanceLoss(transformers.BloomForCausalLM(bypassing))
    model = model_of("llama")
    HeadBalanceLoss(model)
    with pytest.raises(ConfigError, match="already has a head-balance loss: call its remove"):
        HeadBalanceLoss(model)
    strange = model_of("llama")
    strange.model.layers[1].self_attn.output_gate = nn.Linear(32, 4)
    with pytest.raises(UserError, match="LlamaAttention has a module 'output_gate', which may"):
        HeadBalanceLoss(strange)


def test_a_loss_that_the_model_did_not_return():
    model = model_of("llama", torch.float32)
    balance = HeadBalanceLoss(model, COEFF)
    with pytest.raises(UserError, match=r"returned no loss.* labels"):
        model(input_ids=tokens(3)).logits.sum().backward()
    with pytest.raises(UserError, match="only a part of the model was called"):
        balance.remove(), HeadBalanceLoss(model, COEFF), model.model(input_ids=tokens(3))


def test_layers_that_were_not_reached():
    model = model_of("llama", torch.float32)
    balance = HeadBalanceLoss(model, COEFF)
    model.set_attn_implementation("eager")
    step(model, [tokens(3)])
    with pytest.raises(UserError, match=r'no gates of layers 0, 1 .* is not "megasink"'):
        balance.finish_step()


def test_a_mask_of_another_shape():
    model = model_of("lfm3", torch.float32)
    HeadBalanceLoss(model, COEFF)
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    with pytest.raises(
        UserError, match=r"an attention mask \[batch, tokens\], not of shape \[2, 1"
    ):
        model(input_ids=tokens(3), labels=tokens(3), attention_mask=mask)
