"""A tiny model, and made-up texts in the place of the wheels'."""

import json
import random
import sys

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.real_models import analyses, changes, importance, scores, zeroing
from megasink import plugins
from megasink.analysis.metrics import metrics, registry


def sentences(draw, words, count):
    """Return made-up words, with a full stop after every eight."""
    chosen = draw.choices(words, k=count)
    return "".join(word + ". " * (n % 8 == 7) for n, word in enumerate(chosen))


@pytest.fixture(autouse=True, scope="module")
def without_plugin():
    """The metrics of the example's plugin are no longer there for the next file of tests: an
    analysis is another one with them."""
    yield
    if plugins.LOADED.pop(geometry := "examples.real_models.geometry", None):
        del sys.modules[geometry]
        for name in [n for n, entry in metrics().items() if entry.compute.__module__ == geometry]:
            del registry._REGISTRY[name]


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder, and ten texts, six of which losses are measured on."""
    monkeypatch.chdir(tmp_path)
    for module in (importance, scores, zeroing, analyses, changes):
        monkeypatch.setattr(module, "MEASURED", 6)
    monkeypatch.setattr(zeroing, "RESULTS", tmp_path / "committed")
    monkeypatch.setattr(importance, "DRAWS", 20)
    (folder := tmp_path / "runs/real-models").mkdir(parents=True)
    words = [f"{a}{b}ing " for a in "bcdfgh" for b in "aeiou"]
    draw = random.Random(0)
    texts = [sentences(draw, words, 160) for _ in range(10)]
    lines = [
        {"domain": ("made-up", "other")[number % 2], "wheel": "", "path": "", "text": text}
        for number, text in enumerate(texts)
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = Tokenizer(
        WordLevel({w.strip(): i for i, w in enumerate([*words, "[UNK]", "[BOS]"])}, "[UNK]")
    )
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="[BOS]", eos_token="[BOS]")
    fast.save_pretrained(tmp_path / "own")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, hidden_size=24, intermediate_size=32, head_dim=8,
                         num_attention_heads=3, num_hidden_layers=4)  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # so that heads differ
        for weight in model.parameters():
            weight.mul_(10)
        for layer in model.model.layers:  # and some have sinks
            layer.self_attn.q_proj.weight.mul_(6)
    model.save_pretrained(tmp_path / "own")
    return tmp_path / "own"
