"""What `megasink data` holds in memory: neither torch nor a long document."""

import gzip
import json
import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import pytest

from megasink.data import corpus, long_text, records, tokenizer_process
from megasink.data.corpus import Corpus
from megasink.data.preprocess import _settings, preprocess
from megasink.data.text_tokenizer import parts_of
from megasink.data.tokenizer import load_tokenizer, train_tokenizer
from megasink.data.tokenizer_process import from_tokenizer
from megasink.errors import UserError
from tests.distributed.pool import ROOT

ROWS = "naïve 漢字 \N{SLIGHTLY SMILING FACE} and x = 2048\n" * 300


@pytest.fixture
def elsewhere(monkeypatch):
    """Let this process be one that has not imported transformers."""
    monkeypatch.setattr(tokenizer_process, "sys", type("sys", (), {"modules": {}}))


@pytest.fixture
def folders(folder, sources, tmp_path):
    """Tokenizers of several kinds: a trained one, with BOS, of a class of transformers, added."""
    train_tokenizer([corpus.Document(sources[3], "test")], 400, tmp_path / "bos", bos=True)
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
    with pytest.raises(UserError, match="has no tokenizer that transformers loads") as error:
        from_tokenizer(tmp_path, _settings, parse=False)
    with pytest.raises(UserError) as here:
        load_tokenizer(tmp_path)
    assert str(error.value) == str(here.value)


def test_torch_is_not_in_memory(folder, tmp_path):
    """Neither in this process nor in the one that reads the tokenizer."""
    (tmp_path / "a.txt").write_text(ROWS)
    code = f"""
        import re, resource, sys
        from pathlib import Path
        from megasink.cli import main
        flags = ["--tokenizer", {str(folder)!r}, "--output", {str(tmp_path / "out")!r}]
        assert main(["data", {str(tmp_path / "a.txt")!r}, "--workers", "1", *flags]) == 0
        assert not {{"torch", "transformers"}} & set(sys.modules)
        # Not ru_maxrss of this process, which counts the one that started it.
        status = Path("/proc/self/status").read_text()
        own = int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])
        print("peaks", own >> 10, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    parent, helper = map(int, ran.stdout.rsplit("peaks", 1)[1].split())
    assert parent + helper < 400  # 0.6 GB each with torch


def test_a_long_text_is_never_whole_in_memory(tmp_path):
    """32 MB, which are 96 MB as a Python string."""
    (tmp_path / "long.txt").write_text(ROWS * (32_000_000 // len(ROWS.encode())))
    (document,) = Corpus([tmp_path / "long.txt"])
    tracemalloc.start()
    try:
        parts = sum(1 for _ in parts_of(document.pieces()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parts > 10
    assert peak < 40e6


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_long_file_gives_the_tokens_of_its_text(folder, tmp_path, monkeypatch, suffix):
    pack = gzip.compress if suffix else bytes
    (tmp_path / f"a.txt{suffix}").write_bytes(pack(ROWS.encode()))
    inputs = [tmp_path / f"a.txt{suffix}"]
    preprocess(Corpus(inputs), tmp_path / "whole", folder, workers=1)
    monkeypatch.setattr(corpus, "WHOLE_BYTES", 100)
    monkeypatch.setattr(long_text, "_BLOCK", 7)  # cuts characters
    (document,) = Corpus(inputs)
    assert not isinstance(document.content, str)
    assert document.text == ROWS
    assert len(list(document.pieces())) > 100
    preprocess(Corpus(inputs), tmp_path / "long", folder, workers=1)
    whole, long = (np.fromfile(tmp_path / f"{n}.bin", np.uint16) for n in ("whole", "long"))
    assert np.array_equal(whole, long)


def test_a_long_file_that_is_no_text_or_changes(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(corpus, "WHOLE_BYTES", 100)
    path = tmp_path / "a.txt"
    for content in (b"x" * 200 + b"\0", b"x" * 200 + b"\xff" + b"x" * 50, b"x" * 200 + b"\xf0"):
        path.write_bytes(content)
        read = Corpus([path])
        with pytest.raises(UserError, match=r"no document in .* 1 not UTF-8 text"):
            list(read)
    with pytest.raises(UserError, match="is longer than the 150 bytes"):
        texts(path, max_document_bytes=150)
    path.write_bytes(b"x" * 200)
    (document,) = Corpus([path])
    for content in (b"x" * 100, b"x" * 300, b"\xff" * 200):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.txt changed while it was read"):
            document.text  # noqa: B018


@pytest.mark.parametrize(
    ("record", "is_held"),
    [
        ({"a": [1, {"text": "x"}], "text": ROWS * 3, "b": ROWS}, True),
        ({"text": "\\" * 9_999 + '"\n' * 999 + "漢" * 9_999}, True),
        ({"text": "\N{SLIGHTLY SMILING FACE}" * 9_999}, True),
        ({"text": "short", "b": ROWS}, True),
        ({"text": None, "b": ROWS}, False),
        ({"text": "\ud83d" * 9_999}, False),
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_of_a_long_line_only_the_text_is_held(record, is_held, ascii_only, monkeypatch):
    if "\ud83d" in (record["text"] or "") and not ascii_only:
        pytest.skip("has no UTF-8")
    line = json.dumps(record, ensure_ascii=ascii_only).encode()
    whole = records.text_of(line, "here", "text")
    monkeypatch.setattr(records, "WHOLE_BYTES", 1000)
    text = records.text_of(line, "here", "text")
    assert isinstance(text, long_text.HeldText) == is_held
    assert text == whole if not is_held else (str(text), len(text)) == (whole, len(whole))
    assert not is_held or "".join(text.pieces()) == whole


@pytest.mark.parametrize("bad", [b"\\x", b"\\u12", b"\n", b"\xff", b'"', b"\\ud83d"])
def test_what_is_wrong_in_a_long_line_is_said_as_in_a_short_one(bad, monkeypatch):
    def answer(line):
        try:
            return records.text_of(line, "here", "text")
        except UserError as error:
            return str(error)

    for line in (
        b'{"text": "' + b"x" * 3000 + bad + b'"}',
        b'{"text": "' + b"x" * 3000 + b'", "b": "' + b"y" * 3000 + bad + b'"}',
    ):
        monkeypatch.setattr(records, "WHOLE_BYTES", 1 << 20)
        short = answer(line)
        monkeypatch.setattr(records, "WHOLE_BYTES", 1000)
        held = answer(line)
        assert str(held) == str(short)
