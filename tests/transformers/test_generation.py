"""Caches: greedy tokens, and logits of tokens after a cache, are those of eager attention."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import megasink.transformers  # noqa: F401
from tests.transformers.oracle import ORACLE, batch, distance, in_double, oracle

MODELS = ["llama", "mistral", "gpt-oss", "gemma-3", "gpt-2", "own-sink", "qwen3.5"]


def generated(model, inputs, **options):
    with torch.no_grad():
        return model.generate(
            inputs.ids_BT,
            attention_mask=torch.ones_like(inputs.ids_BT)
            if inputs.mask_BT is None
            else inputs.mask_BT,
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_eager(name, cache):
    model = in_double(name).eval()
    for layout in ("whole", "left"):
        inputs = batch(layout, tokens=9)
        options = {} if cache is None else {"cache_implementation": cache}
        with oracle():
            model.set_attn_implementation(ORACLE)
            expected = generated(model, inputs)
        model.set_attn_implementation("megasink")
        found = generated(model, inputs, **options)
        assert torch.equal(found.sequences, expected.sequences)
        for logits, eager in zip(found.logits, expected.logits, strict=True):
            assert distance(logits, eager) < 1e-6


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("layout", ["whole", "left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_several_tokens_after_a_cache(name, layout, kind):
    """A prompt in pieces: windows of 5 and padding end within them."""
    model = in_double(name).eval()
    inputs = batch(layout, tokens=17)
    mask = torch.ones_like(inputs.ids_BT) if inputs.mask_BT is None else inputs.mask_BT
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with oracle(), torch.no_grad():
        model.set_attn_implementation(ORACLE)
        expected = model(inputs.ids_BT, attention_mask=mask, position_ids=positions).logits
    model.set_attn_implementation("megasink")
    cache = DynamicCache(config=model.config)
    if kind == "static":
        cache = StaticCache(config=model.config, max_cache_len=24)
    pieces = []
    for start, stop in ((0, 7), (7, 8), (8, 12), (12, 17)):
        with torch.no_grad():
            output = model(
                inputs.ids_BT[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
            )
        pieces.append(output.logits)
    real = mask.bool()
    assert distance(torch.cat(pieces, 1)[real], expected[real]) < 1e-7


def test_padding_between_tokens_is_masked():
    model = in_double("llama").eval()
    ids = batch("whole").ids_BT
    mask = torch.ones_like(ids)
    mask[0, 4:6] = 0
    with oracle(), torch.no_grad():
        model.set_attn_implementation(ORACLE)
        expected = model(ids, attention_mask=mask).logits
        model.set_attn_implementation("megasink")
        found = model(ids, attention_mask=mask).logits
    assert distance(found[mask.bool()], expected[mask.bool()]) < 1e-7
