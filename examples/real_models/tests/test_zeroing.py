"""The loss without each head: equal to `megasink.zero_heads`, and resumable."""

import json

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import megasink
from examples.real_models import zeroing
from examples.real_models.zeroing import Measurement, losses, unchanged, without_each_head
from megasink.analysis.capture.input_samples import Sample
from megasink.errors import UserError

SIZE = {"vocab_size": 48, "hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 3,
        "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 8}  # fmt: skip


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZE)).eval()


def gemma():
    windows = {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZE, **windows)).eval()


@pytest.fixture(params=[llama, gemma])
def model(request):
    model = request.param()
    with torch.no_grad():  # so that a head without its output changes the loss
        for weight in model.parameters():
            weight.mul_(4)
    return model


@torch.no_grad()
def test_the_rest_of_the_model_gives_what_all_of_it_gives(model):
    ids = torch.randint(3, 48, (3, 9))
    batch, before = unchanged(model, ids), losses(model, ids)
    share = model(ids).logits[:, :-1].double().softmax(-1)
    assert torch.equal(batch.loss_B, before)
    ran = []
    hooks = [layer.self_attn.register_forward_hook(lambda *_: ran.append(1))
             for layer in model.model.layers]  # fmt: skip
    for layer in range(3):
        ran.clear()
        rise, divergence = without_each_head(model, batch, layer, 3)
        assert len(ran) == 3 * (3 - layer)
        for head in range(3):
            with megasink.zero_heads(model, [(layer, head)]):
                logits = model(ids).logits[:, :-1].double().log_softmax(-1)
            whole = -logits.gather(-1, ids[:, 1:, None]).mean((1, 2))
            torch.testing.assert_close(rise[head], whole - before, rtol=0, atol=1e-6)
            kl = (share * (share.log() - logits)).sum(-1).mean(1)
            torch.testing.assert_close(divergence[head], kl, rtol=0, atol=1e-6)
        assert rise.abs().min() > 1e-4
    for hook in hooks:
        hook.remove()
    assert torch.equal(losses(model, ids), before)
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def samples(seed=0):
    ids = torch.randint(3, 48, (7, 9), generator=torch.Generator().manual_seed(seed))
    return [Sample(tuple(row), "code", "a") for row in ids.tolist()]


@torch.no_grad()
def test_a_measurement_that_is_killed_goes_on(model, tmp_path, monkeypatch):
    monkeypatch.setattr(zeroing, "RESULTS", tmp_path / "committed")
    monkeypatch.setattr(zeroing, "_LOGITS", 2 * 9 * 48)  # two texts at a time
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"

    def measure(path, lines=None, folder=tmp_path / "a-model", texts=None):
        measurement = Measurement(folder, texts or samples(), model, path)
        try:
            left = measurement.left(3)
            steps = (step for block in range(3) for step in measurement.measure(block))
            for _ in range(left if lines is None else lines):
                next(steps)
            return left
        finally:
            measurement.file.close()

    assert measure(whole) == 9
    measure(killed, lines=4)
    assert whole.read_bytes().startswith(killed.read_bytes())
    with killed.open("ab") as file:
        file.write(b'{"block":1,"lay')
    assert measure(killed) == 5
    assert killed.read_bytes() == whole.read_bytes()
    assert measure(killed) == 0

    rows = [json.loads(line) for line in whole.read_text().splitlines()]
    assert rows[0]["heads"] == 3
    assert [len(row["loss"]) for row in rows if "loss" in row] == [3, 3, 1]
    found = np.concatenate([r["rise"] for r in rows if r.get("layer") == 1], -1) * rows[0]["unit"]
    ids = torch.tensor([sample.tokens for sample in samples()])
    rise, divergence = without_each_head(model, unchanged(model, ids), 1, 3)
    np.testing.assert_allclose(found, rise, atol=0.6 * zeroing.UNIT)
    (second,) = [row["kl"] for row in rows if (row.get("block"), row.get("layer")) == (1, 1)]
    expected = divergence[:, 3:6].mean(1) / zeroing.UNIT
    np.testing.assert_allclose(second, expected, atol=0.6)

    # What is committed is gone on with; another model, other texts, a second process are refused.
    (tmp_path / "committed").mkdir()
    whole.rename(tmp_path / "committed" / "new.jsonl")
    assert measure(tmp_path / "new.jsonl") == 0
    with pytest.raises(UserError, match=r"new.jsonl is of another texts: move it away"):
        measure(tmp_path / "new.jsonl", texts=samples(1))
    with pytest.raises(UserError, match=r"is of another model:"):
        measure(tmp_path / "new.jsonl", folder=tmp_path / "b-model")
    first = Measurement(tmp_path / "a-model", samples(), model, killed)
    with pytest.raises(UserError, match="another process is writing it"):
        measure(killed)
    first.file.close()
