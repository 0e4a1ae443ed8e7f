"""Contexts leave the model as it was, and refuse in one line what they cannot do."""

from contextlib import suppress

import pytest
import torch
import transformers

import megasink
from megasink import dynamic_zeroing, intervening, steer_gates, zero_heads
from megasink.analysis.capture.transformers_model import NAME
from megasink.analysis.interventions import DynamicZeroing, RemoveBos, ZeroHeads
from megasink.errors import ConfigError, UserError
from tests.analysis.capture.tiny_models import VOCABULARY, tiny_model

IDS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def model():
    return tiny_model("llama", "sdpa")


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


def hooks_of(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def assert_untouched(model, plain):
    assert torch.equal(logits(model), plain)
    assert hooks_of(model) == 0
    assert model.config._attn_implementation == "sdpa"
    assert NAME not in transformers.AttentionInterface._global_mapping


def test_an_empty_intervention_is_the_plain_model(model):
    plain = logits(model)
    with intervening(model, []):
        assert torch.equal(logits(model), plain)
    with intervening(model, [ZeroHeads([])]):
        assert torch.equal(logits(model), plain)
    with dynamic_zeroing(model, score="awft", threshold=1.0) as zeroed:
        assert torch.equal(logits(model), plain)
    assert zeroed.share == 0.0


def test_the_model_is_what_it_was_after_an_exception(model):
    plain = logits(model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for interventions in ([ZeroHeads([(0, 1)])], [DynamicZeroing("awft", 0.1)]):
        with suppress(ZeroDivisionError), intervening(model, interventions):
            assert not torch.equal(logits(model), plain)
            raise ZeroDivisionError
        assert_untouched(model, plain)
        broken = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), intervening(model, interventions):
            logits(model)
        broken.remove()
        assert_untouched(model, plain)
    with pytest.raises(ConfigError, match=r"head 2\.0: the model has layers 0 to 1"):
        zero_heads(model, [(2, 0)]).__enter__()
    with pytest.raises(ConfigError):
        intervening(model, [DynamicZeroing("awft", 0.1), ZeroHeads([(0, 9)])]).__enter__()
    assert_untouched(model, plain)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_contexts_on_one_model_do_not_nest(model):
    plain = logits(model)
    with zero_heads(model, ["0.1"]):
        before = logits(model)
        with pytest.raises(UserError, match="pass all interventions together"):
            dynamic_zeroing(model, score="awft", threshold=0.5).__enter__()
        assert torch.equal(logits(model), before)
        with zero_heads(other := tiny_model("llama"), [(0, 0)]):
            logits(other)
    assert_untouched(model, plain)


def test_wrong_arguments(model):
    for arguments, message in (
        ({"score": "awft"}, "either threshold or quantile"),
        ({"score": "awft", "threshold": 0.1, "quantile": 0.1}, "either threshold or quantile"),
        ({"score": "awft", "threshold": 1.5}, "use 0 to 1"),
        ({"score": "ahon", "threshold": -1.0}, "use 0 to inf"),
        ({"score": "ahon", "threshold": float("nan")}, "threshold nan"),
        ({"score": "importance", "threshold": 0.5}, "score 'importance' is unknown: choose awft"),
        ({"score": "nothing", "quantile": 0.5}, "score 'nothing' is unknown"),
        ({"score": "awft", "threshold": 0.5, "calibration": [[1, 2]]}, "give quantile"),
        ({"score": "awft", "quantile": 0.5, "calibration": []}, "no token sequences"),
    ):
        with pytest.raises(ValueError, match=message):
            dynamic_zeroing(model, **arguments).__enter__()
    with pytest.raises(UserError, match=r"share of heads 1\.5"):
        dynamic_zeroing(model, score="awft", quantile=1.5).__enter__()
    with pytest.raises(UserError, match="remove-bos changes tokens, not the model"):
        intervening(model, [RemoveBos()]).__enter__()
    with pytest.raises(UserError, match="Linear is neither a transformers model nor"):
        zero_heads(torch.nn.Linear(2, 2), [(0, 0)]).__enter__()
    for arguments, message in (
        ({}, "nothing to steer"),
        ({"scale": -1.0}, "scale -1"),
        ({"scale": float("nan")}, "scale nan"),
        ({"minimum": float("nan")}, "minimum nan"),
        ({"minimum": 0.5, "maximum": 0.2}, "minimum 0.5, maximum 0.2"),
    ):
        with pytest.raises(ValueError, match=message):
            steer_gates(model, [(0, 0)], **arguments).__enter__()
    with pytest.raises(AttributeError, match="no attribute 'zero_head'"):
        megasink.zero_head  # noqa: B018


@pytest.mark.parametrize("seed", [0, 1])
def test_the_first_call_calibrates(model, seed):
    """Its own scores, unchanged: as with those token sequences given, also under generate."""
    generated = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with dynamic_zeroing(model, score="ahon_ln", quantile=0.3, calibration=IDS) as given:
        expected = model.generate(IDS, **generated)
    with dynamic_zeroing(model, score="ahon_ln", quantile=0.3) as zeroed:
        assert zeroed.threshold is None
        assert torch.equal(model.generate(IDS, **generated), expected)
        first = zeroed.threshold
        assert zeroed.samples == 2
        model(IDS[:1])
        assert zeroed.threshold == first
    assert first == pytest.approx(given.threshold, rel=1e-5)
    assert 0.2 < given.share < 0.5
    cache = model(IDS, use_cache=True).past_key_values
    with (
        dynamic_zeroing(model, score="awft", quantile=0.3),
        pytest.raises(UserError, match="continues a cache, so it cannot calibrate"),
    ):
        model(IDS[:, :1], past_key_values=cache)
    with dynamic_zeroing(model, score="random", quantile=0.3, seed=seed) as zeroed:
        logits(model)
    assert zeroed.threshold == 0.3


def test_static_masks_need_no_attention_interface():
    """Any attention implementation, and models that bypass transformers' interface."""
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    bloom = transformers.BloomForCausalLM(config).eval()
    plain = logits(bloom)
    with zero_heads(bloom, [(1, 3)]):
        changed = logits(bloom)
    dense = bloom.transformer.h[1].self_attention.dense
    dense.weight.data[:, 24:] = 0.0
    assert not torch.equal(plain, changed)
    torch.testing.assert_close(logits(bloom), changed, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="BloomForCausalLM bypasses"):
        dynamic_zeroing(bloom, score="awft", threshold=0.5).__enter__()
    with dynamic_zeroing(bloom, score="ahon_ln", threshold=0.9) as zeroed:  # of outputs alone
        logits(bloom)
    assert 0 < zeroed.share < 1
    flex = tiny_model("llama", "flex_attention")
    with zero_heads(flex, [(0, 0)]):
        assert flex.config._attn_implementation == "flex_attention"


def test_outputs_that_do_not_come_by_raise(model):
    bypassing = model.model.layers[1].self_attn
    forward = bypassing.forward
    bypassing.forward = lambda hidden_states, **_: (hidden_states, None)
    with (
        zero_heads(model, [(0, 0)]),
        pytest.raises(UserError, match=r"layers \[1\] of LlamaForCausalLM bypass"),
    ):
        logits(model)
    bypassing.forward = forward
    logits(model)
    added = tiny_model("own-gated", multi_head_addition=True)
    with pytest.raises(ConfigError, match="has multi_head_addition"):
        zero_heads(added, [(0, 0)]).__enter__()
    hybrid = tiny_model("qwen3.5")
    with pytest.raises(ConfigError, match=r"head 0\.0: layer 0 has no softmax attention"):
        zero_heads(hybrid, [(0, 0)]).__enter__()


@pytest.mark.parametrize("called_before", [True, False])
def test_a_compiled_model_is_changed_and_measured_within_the_context_only(model, called_before):
    """Its graph neither ignores the hooks of a context nor keeps them."""
    names = ["layers.0.output", "layers.1.first_weight"]
    plain, (_, cache) = logits(model), megasink.run_with_cache(model, IDS, names)
    changes = {"layers.0.output": 0.0}
    contexts = [zero_heads(model, [(0, 3)]), megasink.hooks(model, changes)]
    expected = []
    for context in contexts:
        with context:
            expected.append(logits(model))
    model.compile(backend="eager")
    if called_before:
        logits(model)
    contexts = [zero_heads(model, [(0, 3)]), megasink.hooks(model, changes)]
    for context, changed in zip(contexts, expected, strict=True):
        with context:
            assert torch.equal(logits(model), changed)
        assert torch.equal(logits(model), plain)
    for _ in range(2):
        again = megasink.run_with_cache(model, IDS, names)[1]
        assert all(torch.equal(again[name], cache[name]) for name in names)
    torch.compiler.reset()


def test_gradients_under_checkpointing_are_those_of_the_changed_model(model):
    """A backward pass after `hooks` would run layers again without the change: refused."""
    model.train()

    def gradient(context, *, inside):
        model.zero_grad()
        with context:
            loss = model(IDS, labels=IDS, use_cache=False).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return model.model.layers[0].mlp.down_proj.weight.grad.clone()

    def contexts():
        changes = {"layers.0.value": lambda value: value * 1.5}
        return zero_heads(model, [(0, 1)]), megasink.hooks(model, changes)

    plain = [gradient(context, inside=False) for context in contexts()]
    model.gradient_checkpointing_enable()
    for context, expected in zip(contexts(), plain, strict=True):
        torch.testing.assert_close(gradient(context, inside=True), expected)
    with pytest.raises(UserError, match="inside the context of hooks"):
        gradient(contexts()[1], inside=False)
