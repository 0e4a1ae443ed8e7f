"""RoPE's scalings in megasink's own modelling file, against stock models with the same weights."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megasink.transformers.modeling.configuration_megasink import MegasinkConfig
from megasink.transformers.modeling.modeling_megasink import MegasinkForCausalLM
from megasink.transformers.modeling.rotary_megasink import MegasinkRotaryEmbedding

# 16 positions before the scaling, of 64.
SHAPE = {
    **{"vocab_size": 101, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"initializer_range": 0.2, "rms_norm_eps": 1e-5, "pad_token_id": 0},
}
ORIGINAL = {"original_max_position_embeddings": 16}
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **ORIGINAL},
    "yarn-mscale": {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
    | ORIGINAL,
    "yarn-factor": {"factor": 4.0, "attention_factor": 1.7, "beta_fast": 4.0} | ORIGINAL,
    "longrope": {
        "short_factor": [1.0 + c / 8 for c in range(8)],
        "long_factor": [2.0 + c for c in range(8)],
        "factor": 4.0,
    }
    | ORIGINAL,
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | ORIGINAL,
}


def models(name):
    """A stock model, and ours with its weights; skewed so that attention weighs much."""
    rope = {"rope_type": name.split("-")[0], "rope_theta": 10000.0, **SCALINGS[name]}
    positions = {"max_position_embeddings": 16 if name == "dynamic" else 64}
    torch.manual_seed(1)
    stock = LlamaForCausalLM(LlamaConfig(**SHAPE, **positions, rope_parameters=dict(rope))).eval()
    config = MegasinkConfig(**SHAPE, **positions, rope_parameters=dict(rope))
    ours = MegasinkForCausalLM(config).eval()
    ours.load_state_dict(stock.state_dict())
    return stock, ours


@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_is_that_of_stock_llama(name):
    stock, ours = models(name)
    tokens = torch.randint(1, 101, (2, 50), generator=torch.Generator().manual_seed(5))
    padding = torch.ones_like(tokens)
    padding[0, :7] = 0
    places = (padding.cumsum(-1) - 1).clamp(min=0)
    said = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    with torch.no_grad():
        # Short, beyond the original length, and short again: some scalings depend on the length.
        for length in (12, 50, 12, 30):
            wanted = stock(tokens[:, :length]).logits
            assert torch.allclose(ours(tokens[:, :length]).logits, wanted, atol=2e-5), length
        assert wanted.abs().max() > 2
        wanted = stock(tokens, attention_mask=padding, position_ids=places).logits
        assert torch.allclose(
            ours(tokens, attention_mask=padding).logits[padding == 1],
            wanted[padding == 1],
            atol=2e-5,
        )
        # With a cache, padded on the left, from below the original length to beyond it.
        given = {"input_ids": tokens[:, :20], "attention_mask": padding[:, :20]}
        made = [m.generate(**given, **said, max_new_tokens=12) for m in (stock, ours)]
        assert torch.equal(made[0].sequences, made[1].sequences)
        for one, other in zip(made[0].scores, made[1].scores, strict=True):
            assert torch.allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("name", ["yarn", "longrope", "llama3"])
def test_a_scaled_share_of_each_head(name):
    rope = {"rope_type": name, "rope_theta": 10000.0, **SCALINGS[name]}
    rope |= {"partial_rotary_factor": 0.5}
    if name == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = MegasinkConfig(**SHAPE, max_position_embeddings=64, rope_parameters=rope)
    assert config.rotary_percent == 0.5
    frequencies, factor = ROPE_INIT_FUNCTIONS[name](config)
    cosines, _ = MegasinkRotaryEmbedding(config)(torch.zeros(1), torch.arange(9)[None])
    angles = torch.arange(9)[:, None] * frequencies
    assert cosines.shape == (1, 9, 8)
    assert torch.equal(cosines[0, :, :4], angles.cos() * factor)
    with torch.no_grad():
        assert MegasinkForCausalLM(config)(torch.ones(1, 9).long()).logits.isfinite().all()
    share = MegasinkConfig(**config.to_dict())
    assert share.rope_parameters["partial_rotary_factor"] == share.rotary_percent == 0.5


def test_the_frequencies_of_a_model_of_16_bits_are_not_rounded(tmp_path):
    _, ours = models("yarn")
    wanted = ours.model.rotary_emb.inv_freq.clone()
    ours.save_pretrained(tmp_path)
    loaded = MegasinkForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for model in (ours.bfloat16(), loaded):
        assert model.lm_head.weight.dtype == torch.bfloat16
        assert torch.equal(model.model.rotary_emb.inv_freq, wanted)
        assert model.model.rotary_emb.attention_scaling > 1.1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "does not support the rope_type 'spiral'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
            r"rope_parameters per layer type \(full_attention\)",
        ),
        (
            {"rotary_percent": 0.25, "rope_parameters": {"partial_rotary_factor": 0.5}},
            "rotary_percent 0.25 and partial_rotary_factor 0.5: give one",
        ),
    ],
)
def test_what_it_cannot_compute_is_refused_by_name(given, said):
    with pytest.raises(ValueError, match=said):
        MegasinkForCausalLM(MegasinkConfig(**SHAPE | given))
