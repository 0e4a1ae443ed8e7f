"""Under torch.compile: one graph, the same numbers, and an error for what it cannot compute."""

import pytest
import torch
from torch import nn
from transformers import StaticCache

from megasink.transformers import megasink_attention, megasink_mask
from tests.transformers.oracle import Batch, batch, distance, in_double, logits_of


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def gradients(model, inputs, forward):
    model.zero_grad()
    logits = forward(inputs)
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def one_layer(name, **options):
    """Compilation takes seconds per layer."""
    model = in_double(name, num_hidden_layers=1, **options)
    model.set_attn_implementation("megasink")
    return model


def test_a_step_is_one_graph():
    model = one_layer("granite-swa", layer_types=["sliding_attention"])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for layout in ("whole", "left", "right"):
        inputs = batch(layout)
        found = gradients(model, inputs, lambda given: logits_of(compiled, given))
        expected = gradients(model, inputs, lambda given: logits_of(model, given))
        for a, b in zip(found, expected, strict=True):
            assert distance(a, b) < 1e-6


def test_a_token_after_a_static_cache_is_one_graph():
    model = one_layer("granite-swa", layer_types=["full_attention"]).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    inputs = batch("left", tokens=9)
    expected = logits_of(model, inputs)[:, 7:]
    cache = StaticCache(config=model.config, max_cache_len=12)
    logits = []
    with torch.no_grad():
        for start, stop, run in ((0, 7, model), (7, 8, compiled), (8, 9, compiled)):
            output = run(
                inputs.ids_BT[:, start:stop],
                attention_mask=torch.nn.functional.pad(inputs.mask_BT[:, :stop], (0, 12 - stop)),
                position_ids=torch.arange(start, stop)[None],
                past_key_values=cache,
            )
            logits.append(output.logits)
    assert distance(torch.cat(logits[1:], 1), expected) < 1e-6


def test_packed_documents_are_refused():
    """The rows are not computed as one document: positions that start anew fail an assertion."""
    model = one_layer("llama")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    positions = torch.arange(8)[None]
    ids = batch("whole", tokens=8, rows=1).ids_BT
    whole = Batch(ids, None, positions, torch.ones_like(ids, dtype=torch.bool))
    with torch.no_grad():
        assert distance(logits_of(compiled, whole), logits_of(model, whole)) < 1e-6
        with pytest.raises(RuntimeError, match="packed documents"):
            logits_of(compiled, whole._replace(positions_BT=positions % 5))


def test_packed_documents_that_the_mask_does_not_know_are_refused_too():
    """GPT-OSS makes its masks without the positions."""
    layer, mask = nn.Module(), megasink_mask(1, 8, 8)
    tensors = torch.randn(3, 1, 2, 8, 4)

    def attend(positions_BT):
        return megasink_attention(layer, *tensors, mask, position_ids=positions_BT)[0]

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    positions = torch.arange(8)[None]
    assert torch.equal(compiled(positions), attend(positions))
    with pytest.raises(RuntimeError, match="packed documents"):
        compiled(positions % 5)


def test_padding_between_tokens_is_refused():
    model = one_layer("llama")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    inputs = batch("left", tokens=8, rows=2)
    inputs.mask_BT[0, 3] = 0
    with torch.no_grad(), pytest.raises(RuntimeError, match="padding on one side"):
        logits_of(compiled, inputs)
