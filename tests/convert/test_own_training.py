"""Fine-tuning megasink's own modelling file with transformers: routers, plans, memory."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megasink.transformers.modeling.configuration_megasink import MegasinkConfig
from megasink.transformers.modeling.modeling_megasink import MegasinkForCausalLM
from tests.convert.models import OWN
from tests.convert.own_models import TOKENS, tiny
from tests.versions import is_old

EXPERTS = [name for name, (_, model) in OWN.items() if model.experts]


def test_the_loss_of_the_experts_is_that_of_stock_qwen3_moe():
    shape = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    shape |= {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    shape |= {"router_aux_loss_coef": 0.5, "rms_norm_eps": 1e-6, "output_router_logits": True}
    shape |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    torch.manual_seed(1)
    stock = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, moe_intermediate_size=40))
    ours = MegasinkForCausalLM(MegasinkConfig(**shape, intermediate_size=40, qk_norm=True))
    ours.load_state_dict(stock.state_dict())
    padding = torch.ones_like(TOKENS)
    padding[1, 15:] = 0
    for mask in (None, padding):
        seen = torch.ones_like(padding) == 1 if mask is None else padding == 1
        labels = TOKENS.where(seen, -100)
        outputs = [m(TOKENS, attention_mask=mask, labels=labels) for m in (ours, stock)]
        assert torch.allclose(outputs[0].loss, outputs[1].loss, atol=1e-5)
        assert torch.allclose(outputs[0].aux_loss, outputs[1].aux_loss, atol=1e-5)
        assert outputs[0].aux_loss > 1
        for one, other in zip(*(out.router_logits for out in outputs), strict=True):
            assert one.shape == (TOKENS.numel(), 4)
            assert torch.allclose(one[seen.flatten()], other[seen.flatten()], atol=1e-5)
        for out in outputs:
            out.loss.backward()
    routers = [m.model.layers[0].mlp.gate.weight.grad for m in (ours, stock)]
    assert torch.allclose(*routers, atol=1e-5)


@pytest.mark.parametrize("name", EXPERTS)
def test_router_logits_are_recorded_when_asked_for(name):
    model = tiny(name)
    plain = model(TOKENS, labels=TOKENS)
    assert plain.router_logits is None
    assert plain.aux_loss is None
    asked = model(TOKENS, labels=TOKENS, output_router_logits=True)
    config = model.config
    logits = asked.router_logits
    if (
        config.moe_router_score_function == "sigmoid"
    ):  # each expert's share of the sigmoids, as in Megatron
        logits = [
            (layer.sigmoid() / layer.sigmoid().sum(-1, keepdim=True)).log() for layer in logits
        ]
    wanted = load_balancing_loss_func(tuple(logits), config.num_experts, config.num_experts_per_tok)
    assert len(asked.router_logits) == config.num_hidden_layers - config.first_k_dense_replace
    assert torch.allclose(asked.loss - plain.loss, 0.001 * wanted, atol=1e-6)
    config.output_router_logits = True
    assert torch.allclose(model(TOKENS).aux_loss, wanted)
    assert model(TOKENS, output_router_logits=False).router_logits is None
    # Of the last token alone, though the mask is that of all.
    kept = model(TOKENS[:, :-1], use_cache=True).past_key_values
    last = {"attention_mask": torch.ones_like(TOKENS), "past_key_values": kept}
    assert model(TOKENS[:, -1:], **last).router_logits[0].shape == (2, config.num_experts)


def test_a_model_without_experts_has_no_router():
    model = tiny("own-headwise")
    model.config.output_router_logits = True
    out = model(TOKENS, labels=TOKENS, output_router_logits=True)
    assert out.loss.isfinite()
    assert "router_logits" not in out


@pytest.mark.parametrize("name", OWN)
def test_plans_and_float32_name_what_the_model_has(name):
    model = tiny(name)
    modules = {n.replace(".0.", ".*.").replace(".1.", ".*.") for n, _ in model.named_modules()}
    weights = {n.replace(".0.", ".*.").replace(".1.", ".*.") for n, _ in model.named_parameters()}
    experts = getattr(model, "ep_plan", model._ep_plan)  # public in later versions of transformers
    for plan in (model.tp_plan, experts, model.pp_plan):
        assert set(plan) <= modules | weights
    assert bool(experts) == bool(OWN[name][1].experts)
    divided = {n for n in weights if {n, n.rsplit(".", 1)[0]} & set(model.tp_plan)}
    if model.config.base_model_tp_plan:
        # One copy on each rank: norms of hidden states, routers, and biases of whole tensors.
        undivided = {
            n for n in weights - divided if "norm" not in n and not n.endswith("mlp.gate.weight")
        }
        # Before 5.23 transformers leaves the embeddings whole, and 5.6 the output layer.
        whole = {"model.embed_positions.weight", "model.embed_tokens.weight"}
        assert undivided <= (whole | {"lm_head.weight"} if is_old("transformers") else whole)
    kept = model._keep_in_fp32_modules_strict
    held = weights | {name for name, _ in model.named_buffers()}
    assert all(any(part in name.split(".") for name in held) for part in kept), kept
    half = {n for n in ("sinks", "key_bias", "value_bias", "position_bias") if n not in kept}
    assert not any(part in weight.split(".") for weight in weights for part in half)


def test_experts_can_be_computed_in_other_ways():
    model = tiny("own-sink-moe-qk-norm")
    with torch.no_grad():
        wanted = model(TOKENS).logits
        for how in ("batched_mm", "grouped_mm"):
            model.set_experts_implementation(how)
            assert torch.allclose(model(TOKENS).logits, wanted, atol=2e-5), how


@pytest.mark.parametrize(
    "keep",
    [
        *(0, 3, torch.tensor([2, 5])),
        *(torch.tensor([[2, 5], [1, 4]]), torch.arange(42).view(2, 21) % 3 == 0),
    ],
)
def test_the_logits_of_some_positions(keep):
    model = tiny("own-headwise")
    with torch.no_grad():
        everywhere, kept = model(TOKENS).logits, model(TOKENS, logits_to_keep=keep).logits
    if not torch.is_tensor(keep):
        wanted = everywhere[:, -keep:] if keep else everywhere
    elif keep.dim() == 1 or keep.dtype == torch.bool:
        wanted = everywhere[:, keep] if keep.dim() == 1 else everywhere[keep]
    else:
        wanted = torch.stack([row[places] for row, places in zip(everywhere, keep, strict=True)])
    assert torch.allclose(kept, wanted, atol=1e-6)
