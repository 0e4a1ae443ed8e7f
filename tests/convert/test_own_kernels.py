"""megasink's own modelling file under every kernel, with caches and with padding.

Not covered: CUDA, and so the kernels of GPUs.
"""

import contextlib
import itertools
import re
from unittest import mock

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.integrations import flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megasink.transformers.modeling.modeling_megasink import MegasinkForCausalLM
from tests.convert.models import OWN
from tests.convert.own_models import BIASED, POSITIONED, SINKS, TOKENS, tiny
from tests.versions import is_old

# What reaches a kernel is the same for the others.
ANY_KERNEL = [
    "own-headwise",
    "own-elementwise-moe",
    "own-query-ns",
    "own-v-bias-shared",
    "own-gpt2",
    "own-latent-headwise-biases",
]


@contextlib.contextmanager
def kernel(model, name):
    """A model under a kernel; flex_attention as Python, because its compilation takes a minute."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        yield model
    model.set_attn_implementation(before)


@pytest.mark.parametrize("name", ANY_KERNEL)
def test_every_kernel_gives_the_same(name):
    model = tiny(name)
    logits = {}
    for kind in ("eager", "sdpa", "flex_attention"):
        with kernel(model, kind):
            logits[kind] = model(TOKENS).logits
            padding = torch.ones_like(TOKENS)
            padding[0, :4] = 0
            logits[f"{kind}, padded"] = model(TOKENS, attention_mask=padding).logits[:, 4:]
    for one, other in itertools.pairwise(("eager", "sdpa", "flex_attention")):
        assert torch.allclose(logits[one], logits[other], atol=2e-5)
        both = logits[f"{one}, padded"], logits[f"{other}, padded"]
        assert torch.allclose(*both, atol=2e-5)
    assert not torch.allclose(logits["eager"][:, 4:], logits["eager, padded"], atol=1e-2)


class _OnDevice(torch.Tensor):
    """A tensor that says that it is not on the CPU, where transformers has no flex with sinks."""

    device = torch.device("cuda")


@pytest.mark.parametrize("name", SINKS)
def test_flex_attention_has_the_sinks(name):
    model = tiny(name)
    with kernel(model, "eager"):
        eager = model(TOKENS).logits
    with kernel(model, "flex_attention"):
        with pytest.raises(ValueError, match="sinks cannot be run on CPU"):
            model(TOKENS)
        forward, compiled = (
            flex_attention.flex_attention_forward,
            flex_attention.compile_friendly_flex_attention,
        )

        def elsewhere(module, query, *args, **kwargs):
            return forward(module, query.as_subclass(_OnDevice), *args, **kwargs)

        def here(query, *args, **kwargs):
            return compiled(query.as_subclass(torch.Tensor), *args, **kwargs)

        with (
            mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, flex_attention=elsewhere),
            mock.patch.object(flex_attention, "compile_friendly_flex_attention", here),
        ):
            flex = model(TOKENS).logits
    assert torch.allclose(eager, flex, atol=2e-5)


@pytest.mark.parametrize("name", ["own-sink-moe-qk-norm", *BIASED])
@pytest.mark.parametrize(
    "kind",
    [
        *("sdpa", "flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"),
        *("paged|sdpa", "flex_attention", "paged|eager", "flash_attention_4", "sglang"),
    ],
)
def test_a_kernel_that_would_drop_something_is_refused(name, kind):
    model = tiny(name)
    if name in SINKS and kind in ("flex_attention", "paged|eager", "flash_attention_4"):
        return  # these have sinks
    what = "attention sinks" if OWN[name][1].has_sink else "a key or position bias"
    with pytest.raises(ValueError, match=f"would drop ({what}|a .* bias): use"):
        model.set_attn_implementation(kind)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["flash_attention_4", "sglang", "vllm", "paged|sdpa"])
def test_a_kernel_for_values_as_wide_as_keys_is_refused(kind):
    with pytest.raises(ValueError, match=f"{re.escape(kind)}.* values as wide as keys: use"):
        tiny("own-latent-headwise-biases").set_attn_implementation(kind)


def test_an_engine_that_would_drop_sinks_is_refused_as_it_loads():
    """As SGLang's transformers backend does: its implementation is in the config of a new model."""
    config = tiny("own-sink-moe-qk-norm").config
    config._attn_implementation = "sglang"
    with (
        mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sglang": print}),
        pytest.raises(ValueError, match='"sglang" would drop attention sinks'),
    ):
        MegasinkForCausalLM(config)


# Whatever has positions, a window, or more keys than tokens.
CACHED = [
    *(
        "own-sink-moe-qk-norm",
        "own-sink-windows-biases",
        "own-key-identity",
        "own-partial-rotary-clip",
    ),
    *("own-off-by-one-llama3", "own-headwise", "own-gpt2", "own-sinusoids", *POSITIONED),
    "own-latent-sink-experts",
]


@pytest.mark.parametrize("name", CACHED)
def test_cached_decoding_and_padding_change_nothing(name):
    model = tiny(name)
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        unpadded = {"attention_mask": torch.ones_like(TOKENS)}
        plain = model.generate(TOKENS, use_cache=False, **unpadded, **greedy)
        assert torch.equal(model.generate(TOKENS, **unpadded, **greedy), plain)
        static = {"cache_implementation": "static", "disable_compile": True}
        assert torch.equal(model.generate(TOKENS, **unpadded, **greedy, **static), plain)
        short = TOKENS[:1, 5:]
        padded = torch.cat([torch.full((1, 5), 7), short], dim=1)
        both = torch.cat([padded, TOKENS[1:]])
        mask = torch.ones_like(both)
        mask[0, :5] = 0
        logits = model(both, attention_mask=mask).logits
        assert torch.allclose(logits[:1, 5:], model(short).logits, atol=2e-5)
        assert torch.allclose(logits[1:], model(TOKENS[1:]).logits, atol=2e-5)
        made = model.generate(both, attention_mask=mask, **greedy)
        alone = model.generate(short, attention_mask=torch.ones_like(short), **greedy)
        assert torch.equal(made[0, both.shape[1] :], alone[0, short.shape[1] :])
        assert torch.equal(made[1], plain[1])


# Older versions of transformers forget the window in continuous batching, also of their own models.
@pytest.mark.parametrize(
    "name", ["own-gpt2", "own-elementwise" if is_old("transformers") else "own-headwise"]
)
def test_continuous_batching_changes_no_token(name):
    model = tiny(name)
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    rows = [TOKENS[0].tolist(), TOKENS[1, 3:].tolist()]
    with kernel(model, "sdpa"):
        alone = [
            model.generate(
                torch.tensor([row]),
                attention_mask=torch.ones(1, len(row)),
                generation_config=config,
            )[0, len(row) :].tolist()
            for row in rows
        ]
        given = {"generation_config": config, "continuous_batching_config": small}
        together = model.generate_batch(inputs=rows, **given)
    assert [together[name].generated_tokens for name in sorted(together)] == alone
