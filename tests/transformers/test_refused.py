"""What is not computed is refused in one sentence that names it."""

import pytest
import torch
import transformers
from transformers import DynamicCache

import megasink.transformers  # noqa: F401
from megasink.analysis.capture.segments import segments_of
from megasink.errors import UserError
from tests.analysis.capture.tiny_models import tiny_model
from tests.transformers.oracle import batch

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def refused(model, what, **inputs):
    model.set_attn_implementation("megasink")
    with pytest.raises(UserError, match=what) as caught:
        model(batch("whole").ids_BT, **inputs)
    assert len(str(caught.value).splitlines()) == 1
    assert 'attn_implementation="megasink" cannot run ' in str(caught.value)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Gemma2", r"caps its attention scores \(softcap\)"),
        ("Llama4Text", r"chunked \(attention_chunk_size 4\)"),
    ],
)
def test_models_are_refused_by_name(name, what):
    options = dict(SMALL)
    if name == "Llama4Text":
        options |= {
            "attention_chunk_size": 4,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "layer_types": ["chunked_attention", "full_attention"],
        }
    config = getattr(transformers, f"{name}Config")(**options)
    kind = name.replace("Llama4Text", "Llama4")
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config)
    refused(model, what)


def test_bidirectional_attention_is_refused():
    refused(tiny_model("gemma-3", use_bidirectional_attention=True), "adds another mask")
    config = transformers.BertConfig(**SMALL)
    refused(transformers.BertModel(config), "bidirectional")
    config = transformers.LlamaConfig(**SMALL, is_causal=False)
    refused(transformers.LlamaForCausalLM(config), "bidirectional")


def test_cross_attention_is_refused():
    model = tiny_model("gpt-2", add_cross_attention=True)
    states = torch.randn(3, 5, 32)
    refused(model, "bidirectional", encoder_hidden_states=states)


def test_dropout_is_refused_in_training_alone():
    model = tiny_model("llama", attention_dropout=0.1)
    model.set_attn_implementation("megasink")
    model(batch("whole").ids_BT)
    refused(model.train(), r"dropout 0\.1.* set config\.attention_dropout = 0 before")


def test_weights_and_masks_of_ones_own_are_refused():
    model = tiny_model("llama")
    refused(model, "output_attentions", output_attentions=True)
    mask = torch.ones(3, 1, 13, 13, dtype=torch.bool).tril()
    refused(model, r"its mask has shape \[3, 1, 13, 13\]", attention_mask=mask)
    refused(model, "its mask has 3 dimensions", attention_mask=mask[:, 0])


def test_gradients_through_a_padded_cache_are_refused():
    model = tiny_model("llama")
    inputs = batch("left", tokens=6)
    model.set_attn_implementation("megasink")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs.ids_BT, attention_mask=inputs.mask_BT, past_key_values=cache)
    mask = torch.cat((inputs.mask_BT, torch.ones(3, 13, dtype=torch.long)), 1)
    refused(model, "through a padded cache", attention_mask=mask, past_key_values=cache)


def test_continuous_batching_is_refused_by_transformers():
    model = tiny_model("llama")
    model.set_attn_implementation("megasink")
    config = transformers.GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1)
    # Older versions name "paged|megasink" among what they do not have.
    with pytest.raises(ValueError, match=r"megasink\W* is not supported"):
        model.generate_batch(inputs=[[1, 2, 3]], generation_config=config)


def test_our_key_biases_are_refused_when_it_is_set():
    model = tiny_model("own-sink", attention_variant="k-bias", num_experts=0)
    with pytest.raises(ValueError, match='"megasink" would drop a key or position bias'):
        model.set_attn_implementation("megasink")


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_packed_documents_beside_a_mask_are_refused(name):
    """By the mask each row is one sequence: transformers ignores the positions then."""
    inputs = batch("packed")
    given = {"position_ids": inputs.positions_BT, "use_cache": False}
    model = tiny_model(name)
    with pytest.raises(UserError, match=r"row 0 .* restart at token 4, but its attention mask"):
        segments_of(inputs.ids_BT.shape, inputs.real_BT, inputs.positions_BT)
    refused(
        model,
        "row 0 has a document that begins at token 4 .*: leave out attention_mask$",
        attention_mask=inputs.real_BT,
        **given,
    )
    model(inputs.ids_BT, **given)
    # Padding whose positions are those of the first token, as `generate` makes them.
    for layout in ("left", "right"):
        padded = batch(layout)
        positions = (padded.mask_BT.cumsum(-1) - 1).clamp(min=0)
        model(padded.ids_BT, attention_mask=padded.mask_BT, position_ids=positions)
