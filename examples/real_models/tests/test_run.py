"""`make real` from a folder to the pictures, on a tiny model and made-up texts."""

import json
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from examples.real_models import claims, fidelity, rounding, run, scores, surgery
from megasink.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_everything_from_a_folder_of_ones_own(model, capsys, monkeypatch):
    # Commands import a plugin of the examples, which are in the directory where `make real` runs.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert run.main([str(model)]) == 0
    folder = model.parent / "runs/real-models"
    (found,) = json.loads((folder / "importance.json").read_text())
    assert found["model"] == "own"
    assert found["measured"]["texts"] == 3
    printed = capsys.readouterr().out
    assert f"  {run.FOLDER}/own.look/text/report.html: where sinks" in printed
    assert f"make real-all MODEL={model}`" in printed
    assert "own: 8 bits, per token: " in printed
    before = (folder / "zeroing-own.jsonl").read_bytes()

    ran = []  # test_claims.py and test_training.py run them
    for module in (fidelity, surgery, claims):
        monkeypatch.setattr(module, "main", lambda words, of=module: ran.append((of, words)))
    assert run.main(["--all", str(model)]) == 0
    assert ran == [(module, [str(model)]) for module in (fidelity, surgery, claims)]
    assert (folder / "zeroing-own.jsonl").read_bytes().startswith(before)
    (found,) = json.loads((folder / "importance.json").read_text())
    assert found["part"] == ""
    assert found["measured"]["texts"] == 6
    assert found["measured"]["heads"] == 12
    rows = found["kl"]["scores"]
    assert len(rows) == len(found["rise"]["scores"]) == len(scores.MEASURES) + 4
    # Without a learnable sink importance is 1 - AWFT, but for the first row of each text.
    assert rows["importance"]["all"] == rows["awft"]["all"]
    assert (folder / "importance.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "| importance |" in printed
    reason = f"it trains on conversations, and the tokenizer of {model} has no template"
    assert f"balance is left out: {reason}" in printed


def test_steps_that_are_not_for_a_model_say_so(tmp_path, capsys):
    hub = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    hub.save_pretrained(tmp_path / "gpt2")
    words = [str(tmp_path / "gpt2")]
    for step in run.STEPS:
        if step.name in ("fidelity", "surgery"):
            run.run(step, (), words)
    printed = capsys.readouterr().out
    assert (
        printed.count(f"is left out: it is for Llama's architecture, and {words[0]} is gpt2") == 2
    )
    with (
        pytest.raises(run.LeftOut, match="no linear layers"),
        rounding.rounding(hub, 8, 8, by_row=True),
    ):
        pass


def test_the_readme_has_the_steps():
    readme = Path(run.__file__).with_name("README.md").read_text()
    assert run.table() in readme


def test_every_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*missing.*empty"):
        run.main([str(tmp_path / "missing"), str(tmp_path / "empty")])
