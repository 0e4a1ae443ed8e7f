"""Logits and every gradient are those of S x S attention, for every architecture and layout."""

import pytest
import torch

from tests.analysis.capture.tiny_models import ARCHITECTURES, SINKS
from tests.transformers.oracle import (
    ORACLE,
    Batch,
    batch,
    distance,
    in_double,
    logits_of,
    oracle,
    trained,
)

# gpt-2 has dropout by default.
OPTIONS = {"gpt-2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}}
# The masks of their models are made without the positions, so that S x S attention mixes documents.
WITHOUT_POSITIONS = {"gpt-oss", "afmoe"}
# Their linear layers carry a state from document to document.
HYBRID = {"qwen3.5", "qwen3-next", "ling-3"}


@pytest.fixture(scope="module", autouse=True)
def _oracle():
    with oracle():
        yield


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_gradient_equals_that_of_the_definition(name):
    model = in_double(name, **OPTIONS.get(name, {}))
    for layout in ("whole", "left", "right"):
        inputs = batch(layout)
        logits, grads = trained(model, "megasink", inputs)
        expected, expected_grads = trained(model, ORACLE, inputs)
        # Norms and RoPE compute in float32 in every implementation: a difference of the last bit
        # of float64 may become one of float32.
        assert distance(logits, expected) < 1e-7, layout
        assert grads.keys() == expected_grads.keys()
        assert any(key.endswith("sinks") for key in grads) == (name in SINKS)
        for key, grad in grads.items():
            assert distance(grad, expected_grads[key]) < 1e-6, (layout, key)
        if layout == "whole":  # its softmax is in float32, where padding that sees nothing is NaN
            own, _ = trained(model, "eager", inputs)
            assert distance(logits, own) < 2e-5


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - HYBRID))
def test_packed_documents_are_apart(name):
    model = in_double(name, **OPTIONS.get(name, {}))
    inputs = batch("packed")
    logits, grads = trained(model, "megasink", inputs)
    if name not in WITHOUT_POSITIONS:
        expected, expected_grads = trained(model, ORACLE, inputs)
        assert distance(logits, expected) < 1e-7
        for key, grad in grads.items():
            assert distance(grad, expected_grads[key]) < 1e-6, key
    model.set_attn_implementation(ORACLE)
    starts = (inputs.positions_BT == 0).nonzero().tolist()
    for (row, start), (after, stop) in zip(starts, [*starts[1:], [3, 0]], strict=True):
        stop = stop if after == row else inputs.ids_BT.shape[1]
        ids = inputs.ids_BT[row : row + 1, start:stop]
        alone = logits_of(model, Batch(ids, None, None, torch.ones_like(ids, dtype=torch.bool)))
        assert distance(logits[row : row + 1, start:stop], alone.detach()) < 1e-6


def test_cumulative_lengths_are_read_too():
    """As DataCollatorWithFlattening gives them to flash attention."""
    model = in_double("llama")
    inputs = batch("packed", rows=1)
    expected = logits_of(model, inputs)
    model.set_attn_implementation("megasink")
    ends = torch.tensor([0, 4, 5, 13], dtype=torch.int32)
    # Positions that say nothing of documents, but for RoPE they must be those of each.
    shifted = inputs.positions_BT
    by_ends = model(inputs.ids_BT, position_ids=shifted, cu_seq_lens_q=ends, use_cache=False).logits
    assert distance(by_ends, expected) < 2e-5


def test_fine_tuning_gpt_oss_is_that_of_eager_attention():
    """Three steps in float32: the loss and the gradients of each."""
    runs = []
    for implementation in ("eager", "megasink"):
        model = in_double("gpt-oss").float()
        model.set_attn_implementation(implementation)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        runs.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(batch("whole").ids_BT, labels=batch("whole").ids_BT, use_cache=False).loss
            loss.backward()
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            runs[-1].append((loss.item(), grads))
            optimizer.step()
    assert runs[1][2][0] < runs[1][0][0]
    for (eager_loss, eager), (loss, grads) in zip(*runs, strict=True):
        assert loss == pytest.approx(eager_loss, rel=1e-5)
        assert grads.keys() == eager.keys()
        assert any(key.endswith("sinks") for key in grads)
        for key, grad in grads.items():
            assert distance(grad, eager[key]) < 1e-5, key


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_gradient_checkpointing_changes_nothing(name):
    model = in_double(name)
    for layout in ("left", "packed"):
        inputs = batch(layout)
        logits, grads = trained(model, "megasink", inputs)
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            again, grads_again = trained(model, "megasink", inputs)
            model.gradient_checkpointing_disable()
            assert torch.equal(again, logits)
            assert all(torch.equal(grads_again[key], grad) for key, grad in grads.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma-3", "gpt-oss", "granite-swa"])
def test_hidden_states_match_eager_as_transformers_asks_of_sdpa(name, dtype):
    """The grid and tolerances of transformers' `test_eager_matches_sdpa_inference`: 7 rows, the
    last one padded by two tokens on a side or not, a window of 2 (every row has to match here, 80%
    there). Written anew, because the wheel of transformers has no tests."""
    atol, rtol = {
        torch.float32: (1e-6, 1e-4),
        torch.bfloat16: (1e-2, 1e-2),
        torch.float16: (5e-3, 5e-3),
    }[dtype]
    options = {} if name == "llama" else {"sliding_window": 2}
    model = in_double(name, **options).to(dtype).eval()
    for parameter in model.parameters():  # transformers' test too keeps the states small
        parameter.data *= 0.3
    ids = batch("whole", tokens=7, rows=7).ids_BT
    for side in (None, "left", "right"):
        mask = torch.ones_like(ids)
        if side is not None:
            mask[-1, slice(0, 2) if side == "left" else slice(-2, None)] = 0
        states = []
        for implementation in ("eager", "megasink"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                found = model(
                    ids, attention_mask=None if side is None else mask, output_hidden_states=True
                )
            states.append(found.hidden_states[-1][mask.bool()])
        if dtype is torch.bfloat16:
            atol = max(atol, 0.03 * float(states[0].abs().max()))
        torch.testing.assert_close(states[1], states[0], atol=atol, rtol=rtol)
