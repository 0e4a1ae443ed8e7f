"""examples/head_pinning.py: its text, and that the trainer takes its flags."""

import pytest

from examples import head_pinning
from megasink.cli.trigger_language import LETTERS
from megasink.data.tokenizer import load_tokenizer
from megasink.training import early


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pinning")
    head_pinning.TEXTS = {"pretrain": (0, 70), "finetune": (1, 65)}
    head_pinning.write_texts(folder)
    return folder


def test_the_tokenizer_knows_every_letter(folder):
    tokenizer = load_tokenizer(folder / "tokenizer")
    lines = (folder / "pretrain.jsonl").read_text().splitlines()
    assert len(lines) == 70
    ids = tokenizer(LETTERS)["input_ids"]
    assert len(ids) == len(set(ids)) == 1 + len(LETTERS)


def test_the_trainer_takes_the_flags(folder):
    found = {step.what: [str(w) for w in step.command] for step in head_pinning.steps(folder)}
    assert list(found) == ["tokens", "base: training", "base: export", "base: heads"]
    for name in ("data.bin", "data.idx"):
        (folder / name).touch()
    words = [w for w in found["base: training"][1:] if w not in ("--ranks", "1")]
    assert early.read(words).flag_problems == []


def test_lora_adapts_the_base(folder, tmp_path, monkeypatch):
    """Two steps of a tiny model: other weights, with a validation loss."""
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    for name, value in (("FINETUNE", 20), ("BATCH", 2), ("HELD_OUT", 5)):
        monkeypatch.setattr(head_pinning, name, value)
    sizes = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    load_tokenizer(folder / "tokenizer").save_pretrained(tmp_path / "base")
    (tmp_path / "finetune.jsonl").write_text((folder / "finetune.jsonl").read_text())
    head_pinning.adapt(tmp_path, "eq-8", 1e-2, 1)
    assert head_pinning._validation(tmp_path, "eq-8") > 0
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / n) for n in ("base", "eq-8")]
    weights = [model.model.layers[0].self_attn.q_proj.weight for model in models]
    assert weights[0].shape == weights[1].shape
    assert not weights[0].equal(weights[1])
