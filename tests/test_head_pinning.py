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


def test_the_trainer_takes_the_flags(folder, monkeypatch):
    import torch

    importance = torch.tensor([[0.9, 0.9, 0.1, 0.1, 0.1, 0.1]] * 3).numpy()
    monkeypatch.setattr(head_pinning, "_importance", lambda out, name: importance)
    found = {step.what: [str(w) for w in step.command] for step in head_pinning.steps(folder)}
    assert len(found) == 10
    flags = found["eq-8: training"]
    assert flags[flags.index("--head-balance-shared-heads") + 1] == "2"
    for name in ("data.bin", "data.idx"):
        for text in ("pretrain", "finetune"):
            (folder / f"{text}-{name}").touch()
    for what, words in found.items():
        if what.endswith("training"):
            assert (
                early.read([w for w in words[1:] if w not in ("--ranks", "1")]).flag_problems == []
            )
