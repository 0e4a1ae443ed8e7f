"""Texts to samples, with a tokenizer of one token for each character."""

import json

import pytest

from megasink.errors import UserError
from megasink.probe.inputs import text_samples


class Characters:
    """Code points as ids; 1 is BOS, where there is one."""

    name_or_path = "characters"

    def __init__(self, bos):
        self.bos_token_id = 1 if bos else None

    def encode(self, text, add_special_tokens=True):
        begin = [1] if self.bos_token_id and add_special_tokens else []
        return [*begin, *map(ord, text)]


def pieces(samples):
    return ["".join(map(chr, s.tokens)) for s in samples]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz")
    return str(path)


def test_one_long_text_is_cut_into_samples(text, capsys):
    samples = text_samples(Characters(bos=False), [text], seq_length=8, max_samples=100)
    assert pieces(samples) == ["abcdefgh", "ijklmnop", "qrstuvwx"]
    assert [s.source for s in samples] == [text, f"{text}, piece 2", f"{text}, piece 3"]
    said = capsys.readouterr().err
    assert said == f"megasink: {text} is a single text: split into 3 samples of 8 tokens\n"
    some = text_samples(Characters(bos=False), [text], seq_length=8, max_samples=2)
    assert pieces(some) == ["abcdefgh", "ijklmnop"]


@pytest.mark.parametrize("bos", ["auto", "add"])
def test_bos_begins_every_piece(text, bos):
    samples = text_samples(Characters(bos=True), [text], seq_length=10, max_samples=9, bos=bos)
    assert pieces(samples) == ["\1abcdefghi", "\1jklmnopqr"]
    bare = text_samples(Characters(bos=True), [text], seq_length=10, max_samples=9, bos="none")
    assert pieces(bare) == ["abcdefghij", "klmnopqrst"]


def test_pieces_go_on_through_the_segments_of_a_text(text, monkeypatch, capsys):
    monkeypatch.setattr("megasink.probe.inputs.segments", lambda t: iter([t[:10], t[10:]]))
    samples = text_samples(Characters(bos=False), [text], seq_length=8, max_samples=100)
    assert pieces(samples) == ["abcdefgh", "ijklmnop", "qrstuvwx"]
    some = text_samples(Characters(bos=False), [text], seq_length=8, max_samples=1)
    assert pieces(some) == ["abcdefgh"]


def test_a_short_text_is_one_sample_in_silence(text, capsys):
    samples = text_samples(Characters(bos=False), [text], seq_length=20, max_samples=100)
    assert pieces(samples) == ["abcdefghijklmnopqrst"]
    assert capsys.readouterr().err == ""


def test_of_several_documents_the_beginnings_are_taken(tmp_path, capsys):
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps({"text": t * 9}) + "\n" for t in ("abc", "x", "def")))
    samples = text_samples(Characters(bos=False), [str(path)], seq_length=4, max_samples=100)
    assert pieces(samples) == ["abca", "xxxx", "defd"]
    assert capsys.readouterr().err == ""


def test_a_text_of_one_token_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"a\.txt has no document of at least 2 tokens"):
        text_samples(Characters(bos=False), [str(tmp_path / "a.txt")], seq_length=4, max_samples=9)
