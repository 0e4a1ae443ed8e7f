"""Under torch.compile: one graph, the same numbers, and an error for what it cannot compute."""

import pytest
import torch

import megasink.transformers  # noqa: F401
from tests.probe.tiny_models import tiny_model
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


@pytest.mark.parametrize("name", ["llama", "granite-swa"])
def test_a_step_is_one_graph(name):
    model = in_double(name)
    model.set_attn_implementation("megasink")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for layout in ("whole", "left", "right"):
        inputs = batch(layout)
        found = gradients(model, inputs, lambda given: logits_of(compiled, given))
        expected = gradients(model, inputs, lambda given: logits_of(model, given))
        for a, b in zip(found, expected, strict=True):
            assert distance(a, b) < 1e-6


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_packed_documents_are_refused(name):
    """The rows are not computed as one document: positions that start anew fail an assertion."""
    model = tiny_model(name, "eager")
    model.set_attn_implementation("megasink")
    compiled = torch.compile(model, backend="eager")
    positions = torch.arange(8)[None]
    ids = batch("whole", tokens=8, rows=1).ids_BT
    whole = Batch(ids, None, positions, torch.ones_like(ids, dtype=torch.bool))
    with torch.no_grad():
        assert distance(logits_of(compiled, whole), logits_of(model, whole)) < 1e-5
        with pytest.raises(RuntimeError, match="packed documents"):
            logits_of(compiled, whole._replace(positions_BT=positions % 5))


def test_padding_between_tokens_is_refused():
    model = tiny_model("llama", "eager")
    model.set_attn_implementation("megasink")
    compiled = torch.compile(model, backend="eager")
    inputs = batch("left", tokens=8, rows=2)
    inputs.mask_BT[0, 3] = 0
    with torch.no_grad(), pytest.raises(RuntimeError, match="padding on one side"):
        logits_of(compiled, inputs)
