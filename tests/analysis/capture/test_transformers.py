"""Capture from transformers models: nothing changes, and what is read is what the model did.

Shapes: B rows, H query heads, T tokens, S = T keys, E hidden size.
"""

import pytest
import torch
import transformers
from torch import Tensor

from megasink.analysis.capture.attention_statistics import MAP
from megasink.analysis.capture.segments import check_mask, segments_of
from megasink.analysis.capture.transformers_model import NAME, TransformersProbe
from megasink.analysis.metrics import STATISTICS
from megasink.errors import ConfigError, UserError
from megasink.transformers.decoder_blocks import find_blocks
from tests.analysis.capture.kept import Kept
from tests.analysis.capture.tiny_models import ARCHITECTURES, GATED, SINKS, VOCABULARY, tiny_model

TOKENS = 13
STEP = 1e-3
"""Of a head's factor: larger ones send tokens to other experts, smaller ones show float32."""


def tokens(rows: int, count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, count), generator=generator)


def probed(model, ids, *inputs):
    kept = Kept({*STATISTICS, MAP})
    with TransformersProbe(model, kept) as probe:
        output = probe.forward(ids, *inputs)
    return kept, output


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_probing_changes_nothing(name, implementation):
    if name in SINKS and implementation == "sdpa":
        pytest.skip("transformers has no sdpa for it: sdpa would drop the sinks")
    model = tiny_model(name, implementation)
    ids = tokens(2, TOKENS)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with torch.no_grad():
        plain = [model(ids, attention_mask=m, use_cache=False).logits for m in (None, mask)]
    for expected, m in zip(plain, (None, mask), strict=True):
        _, output = probed(model, ids, m)
        assert torch.equal(output.logits, expected)
    assert model.config._attn_implementation == implementation
    assert NAME not in transformers.AttentionInterface._global_mapping
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, plain[0])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_and_states_are_those_that_transformers_reports(name):
    model = tiny_model(name, "eager")
    ids = tokens(2, TOKENS)
    with torch.no_grad():
        told = model(ids, use_cache=False, output_attentions=True, output_hidden_states=True)
    kept, _ = probed(model, ids)
    attentions = iter(told.attentions)
    with_attention = [layer for sample, layer in kept.layers if "gate_HT" in kept.layers[0, layer]]
    layers = model.config.num_hidden_layers
    for layer in range(layers):
        if layer not in with_attention:
            assert name in ("qwen3.5", "qwen3-next", "ling-3")
            continue
        weights_BHTS = next(attentions).double()
        for sample in range(2):
            found = kept.layers[sample, layer]
            weights_HTS = weights_BHTS[sample]
            if name == "granite-swa":  # it reports the softmax before the sink
                weights_HTS = weights_HTS * (1 - found["slot_weight_HT"][..., None])
            close(found[MAP], weights_HTS)
            close(found["first_weight_HT"], weights_HTS[..., 0])
            close(found["column_sum_HT"], weights_HTS.sum(1))
            close(found["square_HT"], weights_HTS.square().sum(-1))
            value_HTD = found["value_GTD"].double()
            value_HTD = value_HTD.repeat_interleave(4 // len(value_HTD), 0)
            close(found["out_HTD"], weights_HTS @ value_HTD)
            if name in SINKS:
                close(found["gate_HT"], weights_HTS.sum(-1))
                close(found["gate_HT"] + found["slot_weight_HT"], torch.ones(4, TOKENS))
            elif name in GATED:
                gate_HTX = found["explicit_gate_HTX"]
                assert gate_HTX.shape[-1] == (8 if GATED[name] == "elementwise" else 1)
                close(found["gated_out_HTD"], found["out_HTD"] * gate_HTX)
                close(found["gate_HT"], gate_HTX.mean(-1))
                assert gate_HTX.std() > 0.1
            else:
                close(found["gate_HT"], weights_HTS[..., 1:].sum(-1))
            branch_TE = (
                found["gated_out_HTD"][..., None, :] @ found["output_weight_HDE"][:, None]
            ).sum(0)
            close(_without_bias(model, layer, found["attention_branch_TE"]), branch_TE[:, 0])
    assert next(attentions, None) is None
    for sample in range(2):
        for layer in range(layers):
            close(kept.states[sample, 2 * layer], told.hidden_states[layer][sample])
            module = _layer(model, layer)
            names = (
                "post_feedforward_layernorm",
                "post_ffn_norm",
                "mlp_output_norm",
                "post_mlp_layernorm",
            )
            norms = (getattr(module, name, None) for name in names)
            norm = next((n for n in norms if n is not None), torch.nn.Identity())
            added = norm(kept.layers[sample, layer]["mlp_branch_TE"])
            after = kept.states[sample, 2 * layer + 1] + added
            close(kept.states[sample, 2 * layer + 2], after)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=2e-5, rtol=2e-5)


def _layer(model, index):
    body = model.base_model
    return (body.h if hasattr(body, "h") else body.layers)[index]


def _without_bias(model, index, branch_TE):
    module = _layer(model, index)
    attention = next(
        getattr(module, n) for n in ("self_attn", "attn", "attention") if hasattr(module, n)
    )
    output = next(
        getattr(attention, n)
        for n in ("o_proj", "c_proj", "dense", "out_proj")
        if hasattr(attention, n)
    )
    return branch_TE if output.bias is None else branch_TE - output.bias


@pytest.mark.parametrize("side", ["left", "right", "packed"])
@pytest.mark.parametrize("name", ["llama", "gpt-oss", "mistral", "qwen3.5", "gpt-2"])
def test_padding_and_other_documents_do_not_count(name, side):
    if side == "packed" and name == "qwen3.5":
        pytest.skip("its linear layers carry a state from document to document")
    model = tiny_model(name)
    lengths = (11, 6)
    if side == "packed" and name == "gpt-oss":  # transformers makes its masks without the positions
        positions = torch.tensor([[0, 1, 2, 0, 1]])
        with pytest.raises(
            UserError, match="megasink does not support the mask of GptOssAttention"
        ):
            probed(model, tokens(1, 5), None, positions)
        return
    alone = [probed(model, tokens(1, n, seed=n))[0] for n in lengths]
    sequences = [tokens(1, n, seed=n)[0] for n in lengths]
    if side == "packed":
        ids = torch.cat(sequences)[None]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        together, _ = probed(model, ids, None, positions)
    else:
        ids = torch.zeros(2, 11, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            where = slice(11 - len(sequence), None) if side == "left" else slice(len(sequence))
            ids[row, where], mask[row, where] = sequence, 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        together, _ = probed(model, ids, mask, positions)
    for sample, expected in enumerate(alone):
        for (_, layer), statistics in expected.layers.items():
            for key, value in statistics.items():
                actual = together.layers[sample, layer][key]
                torch.testing.assert_close(
                    actual, value, atol=1e-4, rtol=1e-4, msg=f"{layer} {key}"
                )
        for (_, half), state in expected.states.items():
            torch.testing.assert_close(together.states[sample, half], state, atol=1e-4, rtol=1e-4)


def losses(logits_BTV, ids_BT, segments):
    """[N]: the mean loss of each sequence."""
    return torch.stack(
        [
            torch.nn.functional.cross_entropy(
                logits_BTV[row, start : stop - 1], ids_BT[row, start + 1 : stop]
            )
            for row, start, stop in segments
        ]
    )


def with_gradients(model, ids, *inputs):
    """{(sample, layer): gradient [H]}."""
    kept = Kept({"mask_gradient_H"})
    with TransformersProbe(model, kept) as probe:
        output = probe.forward(ids, *inputs)
        probe.backward(losses(output.logits, ids, probe.segments).sum())
    return {key: found["mask_gradient_H"] for key, found in kept.layers.items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_gradient_of_a_mask_is_the_slope_of_the_loss(name):
    """Of every head in a padded batch, by central differences with a hook of our own."""
    model, ids = tiny_model(name), tokens(2, TOKENS)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    found = with_gradients(model, ids, mask)
    assert all(weight.requires_grad for weight in model.parameters())
    segments = segments_of((2, TOKENS), mask, None)
    blocks = {i: block for i, block in enumerate(find_blocks(model)) if block.heads}
    assert found.keys() == {(sample, layer) for sample in (0, 1) for layer in blocks}
    largest = max(gradient_H.abs().max() for gradient_H in found.values())
    for layer, block in blocks.items():
        for head in range(block.heads):
            sides = []
            for step in (-STEP, STEP):

                def scaled(_, args, head=head, heads=block.heads, step=step):
                    out = args[0].unflatten(-1, (heads, -1)).clone()
                    out[..., head, :] *= 1 + step
                    return (out.flatten(-2), *args[1:])

                hook = block.output.register_forward_pre_hook(scaled)
                with torch.no_grad():
                    logits = model(ids, attention_mask=mask, use_cache=False).logits
                hook.remove()
                sides.append(losses(logits, ids, segments))
            for sample, slope in enumerate((sides[1] - sides[0]) / (2 * STEP)):
                assert abs(found[sample, layer][head] - slope) < 1e-2 * largest


def test_the_gradient_of_packed_documents_is_that_of_each():
    model, lengths = tiny_model("llama"), (11, 6)
    documents = [tokens(1, n, seed=n) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    together = with_gradients(model, torch.cat(documents, 1), None, positions)
    for sample, ids in enumerate(documents):
        for (_, layer), gradient_H in with_gradients(model, ids).items():
            torch.testing.assert_close(together[sample, layer], gradient_H, atol=1e-5, rtol=1e-4)


def test_a_gradient_that_does_not_pass_is_refused():
    for place, problem in (
        ("self_attn.v_proj", "the attention of layer 1 detaches it"),
        ("mlp", "does not require grad"),
    ):
        model = tiny_model("llama")
        module = model.model.layers[1].get_submodule(place)
        module.register_forward_hook(lambda _, args, out: out.detach())
        if place == "mlp":  # nothing is left of the stream either
            model.model.norm.register_forward_hook(lambda _, args, out: out.detach())
        with pytest.raises(UserError, match=f"gradient of LlamaForCausalLM.*{problem}"):
            with_gradients(model, tokens(1, TOKENS))
        assert all(weight.requires_grad for weight in model.parameters())


def test_an_attention_that_cannot_be_read_is_refused():
    other = tiny_model("llama")
    other.set_attn_implementation("flex_attention")
    with pytest.raises(ConfigError, match="'flex_attention': load it with sdpa or eager"):
        TransformersProbe(other, Kept({"out_HTD"}))


def test_attention_that_is_not_what_it_seems_is_refused():
    ids = tokens(1, TOKENS)
    gated = tiny_model("llama")
    gated.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, args: args[0] * 0.5)
    with pytest.raises(UserError, match="LlamaAttention changes the outputs of its heads"):
        probed(gated, ids)
    bidirectional = tiny_model("llama")
    for layer in bidirectional.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(UserError, match="not causal"):
        probed(bidirectional, ids)
    bypassing = tiny_model("llama")
    bypassing.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UserError, match=r"layers \[1\] of LlamaForCausalLM bypass"):
        probed(bypassing, ids)
    prefix = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    prefix[..., :3] = True
    problem = check_mask(prefix[:, 0], segments_of((1, TOKENS), None, None), None)
    assert problem == (
        "query 0 of row 0 sees 3 keys, but with causal attention over tokens 0 to 12 it would see 1"
    )
    assert NAME not in transformers.AttentionInterface._global_mapping


def test_a_mask_of_its_own_for_a_head_is_refused():
    model = tiny_model("llama")

    def with_hidden_keys(_, args, kwargs):
        mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril().repeat(1, 4, 1, 1)
        mask[:, 3, 5:, :2] = False
        return args, kwargs | {"attention_mask": mask}

    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(with_hidden_keys, with_kwargs=True)
    ids = torch.randint(3, VOCABULARY, (1, TOKENS))
    with pytest.raises(UserError, match="mask of LlamaAttention: it differs between heads"):
        probed(model, ids)


def test_a_window_shows_its_own_keys_only():
    segments = segments_of((1, TOKENS), None, None)
    band = torch.ones(1, TOKENS, TOKENS, dtype=torch.bool).tril().triu(-3)
    assert check_mask(band, segments, 4) is None
    assert "window of 5 over tokens 0 to 12 it would see 5" in str(check_mask(band, segments, 5))
    additive = torch.zeros(1, TOKENS, TOKENS).masked_fill(~band, torch.finfo(torch.float32).min)
    assert check_mask(additive, segments, 4) is None
    biased = additive.index_fill(-1, torch.tensor([2]), 0.5)
    assert "adds numbers" in str(check_mask(biased.where(band, additive), segments, 4))
    shifted = band.roll(1, -1)  # as many keys, the wrong ones
    assert check_mask(shifted, segments, 4) is not None


def test_rows_of_a_batch():
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    assert segments_of((2, 3), mask, None) == [(0, 1, 3), (1, 0, 2)]
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    assert segments_of((1, 5), None, positions) == [(0, 0, 2), (0, 2, 5)]
    with pytest.raises(UserError, match="row 1 of the batch is all padding"):
        segments_of((2, 3), torch.tensor([[1, 1, 1], [0, 0, 0]]), None)
    with pytest.raises(UserError, match="padding between real tokens"):
        segments_of((1, 3), torch.tensor([[1, 0, 1]]), None)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_decoder_that_is_called_past_the_base_model(implementation):
    """OPTForCausalLM calls model.decoder, and model itself never."""
    torch.manual_seed(4)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32}
    config = transformers.OPTConfig(num_hidden_layers=2, num_attention_heads=4, **sizes)
    model = transformers.OPTForCausalLM(config).eval()
    ids = tokens(2, TOKENS)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    model.set_attn_implementation("eager")
    with torch.no_grad():
        told = model(ids, attention_mask=mask, use_cache=False, output_attentions=True)
    model.set_attn_implementation(implementation)
    kept, _ = probed(model, ids, mask)
    for layer, weights_BHTS in enumerate(told.attentions):
        close(kept.layers[0, layer]["first_weight_HT"], weights_BHTS[0, :, :, 0])
        close(kept.layers[1, layer]["first_weight_HT"], weights_BHTS[1, :, 4:, 4])
