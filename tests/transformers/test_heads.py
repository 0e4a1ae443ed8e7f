"""`megasink_heads` of an attention layer gets the output and the gates, and returns the output."""

import itertools

import pytest
import torch
from transformers import AttentionInterface

from megasink.attention import attention
from megasink.errors import UserError
from megasink.transformers.decoder_blocks import output_weight
from tests.transformers.oracle import batch, distance, in_double, logits_of


class Heads:
    """Keeps what it is given; scales the output."""

    def __init__(self, factor: float):
        self.factor, self.calls = factor, []

    def __call__(self, out_BHTD, gate_BHT, real_BT):
        self.calls.append((out_BHTD, gate_BHT, real_BT))
        return self.factor * out_BHTD


def layers_of(model):
    return [layer.self_attn for layer in model.model.layers]


@pytest.mark.parametrize("layout", ["whole", "left", "right", "packed"])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_gates_are_those_of_each_document_by_itself(name, layout):
    model = in_double(name)
    model.set_attn_implementation("megasink")
    inputs, heads = batch(layout), Heads(1.0)
    layers_of(model)[1].megasink_heads = heads
    plain = logits_of(model, inputs)
    ((out_BHTD, gate_BHT, real_BT),) = heads.calls
    if inputs.mask_BT is None:
        assert real_BT is None
    else:
        assert torch.equal(real_BT, inputs.real_BT)
    assert gate_BHT.shape == out_BHTD.shape[:3]
    assert gate_BHT.requires_grad
    # The same rows, one document at a time.
    starts = torch.zeros_like(inputs.ids_BT, dtype=torch.bool)
    starts[:, 0] = True
    if layout == "packed":
        starts = inputs.positions_BT == 0
    for row in range(len(inputs.ids_BT)):
        bounds = [*starts[row].nonzero().flatten().tolist(), inputs.ids_BT.shape[1]]
        for start, stop in itertools.pairwise(bounds):
            keep = slice(start, stop)
            tokens = inputs.real_BT[row, keep]
            heads.calls.clear()
            ids = inputs.ids_BT[row : row + 1, keep][:, tokens]
            positions = torch.arange(stop - start)[tokens][None]
            model(ids, position_ids=positions, use_cache=False)
            ((_, alone_BHT, _),) = heads.calls
            found = gate_BHT[row : row + 1, :, keep][..., tokens]
            assert distance(found, alone_BHT) < 1e-7
    layers_of(model)[1].megasink_heads = Heads(0.5)
    assert distance(logits_of(model, inputs), plain) > 1e-3


def test_the_gate_is_that_of_attention():
    model = in_double("granite-swa")
    model.set_attn_implementation("megasink")
    inputs, kept = batch("whole"), []
    layer = layers_of(model)[1]

    def watch(module, query, key, value, mask, **kwargs):
        kept.append((query, key, value, kwargs))
        return original(module, query, key, value, mask, **kwargs)

    original = AttentionInterface._global_mapping["megasink"]
    AttentionInterface.register("megasink", watch)
    try:
        heads = layer.megasink_heads = Heads(1.0)
        logits_of(model, inputs)
    finally:
        AttentionInterface.register("megasink", original)
    ((_, gate_BHT, _),) = heads.calls
    query, key, value, given = kept[1]
    expected = attention(
        query, key, value, variant="sink", sink_H=given["s_aux"], scale=given["scaling"]
    ).gate_BHT
    assert torch.equal(gate_BHT, expected)


def test_only_training_asks_for_gates():
    model = in_double("llama")
    model.set_attn_implementation("megasink")
    heads = layers_of(model)[0].megasink_heads = Heads(2.0)
    inputs = batch("whole")
    with torch.no_grad():
        logits_of(model, inputs)
    model.eval()
    logits_of(model, inputs)
    assert heads.calls == []


def test_an_output_projection_in_fp8_is_refused():
    projection = torch.nn.Linear(4, 4, bias=False)
    weight = projection.weight.detach().to(torch.float8_e4m3fn)
    projection.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(UserError, match="may be quantized"):
        output_weight(projection, 2)
