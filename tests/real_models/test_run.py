"""`make real` from a folder to the picture, on a tiny model and made-up texts."""

import json
import random

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.real_models import importance, run, scores, zeroing
from megasink.errors import ConfigError


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder, and nine texts, six of which losses are measured on."""
    monkeypatch.chdir(tmp_path)
    for module in (importance, scores, zeroing):
        monkeypatch.setattr(module, "MEASURED", 6)
    monkeypatch.setattr(zeroing, "RESULTS", tmp_path / "committed")
    monkeypatch.setattr(importance, "DRAWS", 20)
    (folder := tmp_path / "runs/real-models").mkdir(parents=True)
    words = [f"{a}{b}ing " for a in "bcdfgh" for b in "aeiou"]
    draw = random.Random(0)
    texts = ["".join(draw.choices(words, k=160)) for _ in range(9)]
    lines = [{"domain": "made-up", "wheel": "", "path": "", "text": text} for text in texts]
    (folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = Tokenizer(
        WordLevel({w.strip(): i for i, w in enumerate([*words, "[UNK]"])}, "[UNK]")
    )
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "own")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=31, hidden_size=24, intermediate_size=32, head_dim=8,
                         num_attention_heads=3, num_hidden_layers=2)  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # so that heads differ
        for weight in model.parameters():
            weight.mul_(10)
    model.save_pretrained(tmp_path / "own")
    return tmp_path / "own"


def test_everything_from_a_folder_of_ones_own(model, capsys):
    assert run.main([str(model)]) == 0
    folder = model.parent / "runs/real-models"
    (found,) = json.loads((folder / "importance.json").read_text())
    assert found["model"] == "own"
    assert found["part"] == ""
    assert found["measured"]["texts"] == found["measured"]["heads"] == 6
    rows = found["kl"]["scores"]
    assert len(rows) == len(found["rise"]["scores"]) == len(scores.MEASURES) + 4
    # Without a learnable sink importance is 1 - AWFT, but for the first row of each text.
    assert rows["importance"]["all"] == rows["awft"]["all"]
    assert (folder / "importance.png").read_bytes().startswith(b"\x89PNG")
    assert "| importance |" in capsys.readouterr().out
    before = (folder / "zeroing-own.jsonl").read_bytes()
    assert run.main([str(model)]) == 0
    assert (folder / "zeroing-own.jsonl").read_bytes() == before


def test_every_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*missing.*empty"):
        run.main([str(tmp_path / "missing"), str(tmp_path / "empty")])
