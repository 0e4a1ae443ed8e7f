"""What `megasink data` does not hold in memory: torch."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from megasink.data import encode
from megasink.data.corpus import Document
from megasink.data.encode import from_tokenizer
from megasink.data.hf_tokenizer import load_tokenizer, train_tokenizer
from megasink.data.preprocess import _settings
from megasink.errors import UserError
from tests.distributed.pool import ROOT

ROWS = "naïve 漢字 \N{SLIGHTLY SMILING FACE} and x = 2048\n" * 300


@pytest.fixture
def elsewhere(monkeypatch):
    """Let this process be one that has not imported transformers."""
    monkeypatch.setattr(encode, "sys", type("sys", (), {"modules": {}}))


@pytest.fixture
def folders(folder, sources, tmp_path):
    """Tokenizers of several kinds: a trained one, with BOS, of a class of transformers, added."""
    train_tokenizer([Document(sources[3], "test")], 400, tmp_path / "bos", bos=True)
    for name, extra in {
        "llama": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True},
        "added": {"additional_special_tokens": ["<|turn|>"]},
    }.items():
        tokenizer = load_tokenizer(tmp_path / "bos")
        tokenizer.save_pretrained(tmp_path / name)
        config = tmp_path / name / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | extra))
    return [folder, *(tmp_path / name for name in ("bos", "llama", "added"))]


def test_a_tokenizer_read_without_torch_is_the_same(folders, elsewhere):
    with_torch = [_settings(load_tokenizer(folder), parse=False) for folder in folders]
    assert [from_tokenizer(f, _settings, parse=False) for f in folders] == with_torch
    assert len({made.sha256 for made in with_torch}) > 2


def test_a_bad_folder_is_one_error_in_either_process(tmp_path, elsewhere):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="transformers cannot load the tokenizer in") as error:
        from_tokenizer(tmp_path, _settings, parse=False)
    with pytest.raises(UserError) as here:
        load_tokenizer(tmp_path)
    assert str(error.value) == str(here.value)


def test_torch_is_not_in_memory(folder, tmp_path):
    """Neither in this process nor in the one that reads the tokenizer: 0.6 GB each."""
    (tmp_path / "a.txt").write_text(ROWS)
    (tmp_path / "torch.py").write_text("from pathlib import Path; Path(__file__ + '-seen').touch()")
    line = ["data", str(tmp_path / "a.txt"), "--workers", "1", "--tokenizer", str(folder)]
    line += ["--output", str(tmp_path / "out")]
    code = """
        import sys
        from megasink.cli import main
        assert main(sys.argv[1:]) == 0
        assert not {"torch", "transformers"} & set(sys.modules)
    """

    def ran(code):
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
        command = [sys.executable, "-c", textwrap.dedent(code), *line]
        subprocess.run(command, env=environment, check=True)
        return (tmp_path / "torch.py-seen").exists()

    assert not ran(code)
    assert (tmp_path / "out.bin").exists()
    assert ran("import torch")
