"""Texts to samples, with a tokenizer of one token for each character."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megasink.analysis.capture.input_samples import (
    Reader,
    Sample,
    cut_at_random,
    dataset_names,
    text_samples,
    with_replaced_tokens,
)
from megasink.analysis.measure import Recorder, run
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.run_sweep import Setting, samples_of
from megasink.data.replaced_tokens import replacement
from megasink.data.token_bytes import TokenBytes
from megasink.errors import UserError


class Characters:
    """Code points as ids; 1 is BOS, where there is one."""

    name_or_path = "characters"

    def __init__(self, bos):
        self.bos_token_id = 1 if bos else None

    def encode(self, text, add_special_tokens=True, split_special_tokens=True):
        begin = [1] if self.bos_token_id and add_special_tokens else []
        return [*begin, *map(ord, text)]


def pieces(samples):
    return ["".join(map(chr, s.tokens)) for s in samples]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz")
    return str(path)


def test_documents_that_are_left_out_are_named(tmp_path, capsys):
    for name, content in {"a": b"first", "b": b"caf\xe9", "c": b"third"}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    reader = Reader(Characters(bos=False))
    samples = text_samples(reader, [str(tmp_path)], seq_length=8, max_samples=9)
    assert pieces(samples) == ["first", "third"]
    where = f"1 in {tmp_path} (first {tmp_path / 'b.txt'})"
    assert capsys.readouterr().err == f"megasink: skipped, not UTF-8 text: {where}\n"


def test_one_long_text_is_cut_into_samples(text, capsys):
    samples = text_samples(Reader(Characters(bos=False)), [text], seq_length=8, max_samples=100)
    assert pieces(samples) == ["abcdefgh", "ijklmnop", "qrstuvwx"]
    assert [s.source for s in samples] == [text, f"{text}, piece 2", f"{text}, piece 3"]
    said = capsys.readouterr().err
    assert said == f"megasink: the single text of {text} was split into 3 samples of 8 tokens\n"
    some = text_samples(Reader(Characters(bos=False)), [text], seq_length=8, max_samples=2)
    assert pieces(some) == ["abcdefgh", "ijklmnop"]


@pytest.mark.parametrize("bos", ["auto", "add"])
def test_bos_begins_every_piece(text, bos):
    samples = text_samples(Reader(Characters(True), bos), [text], seq_length=10, max_samples=9)
    assert pieces(samples) == ["\1abcdefghi", "\1jklmnopqr"]
    bare = text_samples(Reader(Characters(True), "none"), [text], seq_length=10, max_samples=9)
    assert pieces(bare) == ["abcdefghij", "klmnopqrst"]


def test_a_short_text_is_one_sample_in_silence(text, capsys):
    samples = text_samples(Reader(Characters(bos=False)), [text], seq_length=20, max_samples=100)
    assert pieces(samples) == ["abcdefghijklmnopqrst"]
    assert capsys.readouterr().err == ""


def test_of_several_documents_the_beginnings_are_taken(tmp_path, capsys):
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps({"text": t * 9}) + "\n" for t in ("abc", "x", "def")))
    samples = text_samples(
        Reader(Characters(bos=False)), [str(path)], seq_length=4, max_samples=100
    )
    assert pieces(samples) == ["abca", "xxxx", "defd"]
    assert capsys.readouterr().err == ""


def test_a_text_of_one_token_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"a\.txt has no document of 2 or more tokens"):
        text_samples(
            Reader(Characters(bos=False)), [str(tmp_path / "a.txt")], seq_length=4, max_samples=9
        )


def replacing(positions, value):
    return replacement(positions, value, seed=1, tokenizer=None, size=60)


def test_replaced_tokens_are_those_of_the_number_in_the_dataset():
    samples = [Sample((90, 91, 92, 93), name, "-") for name in ("a", "b", "a")]
    first, other, second = with_replaced_tokens(samples, replacing([0, 2], "random"))
    assert first.tokens == other.tokens != second.tokens
    assert [first.tokens[i] for i in (1, 3)] == [91, 93]
    assert max(first.tokens[0], first.tokens[2]) < 60
    assert first.replaced == (4, 2)  # counted from the end
    assert with_replaced_tokens(samples, None) == samples


def test_a_sweep_replaces_in_the_sequence_with_bos_and_copies():
    content = [Sample((10, 11, 12, 13), "a", "-")]
    setting = Setting(length=3, bos="add", copies=2)
    (found,) = samples_of(setting, content, (7,), 1, replacing([0, 3], "50"))
    assert found.tokens == (7, 50, 1, 10, 50, 12)
    assert found.scored == 2
    assert found.replaced == (5, 2)


def test_replaced_targets_have_nats_and_no_bytes():
    class Uniform:
        """A model that gives every token the same probability."""

        model = torch.nn.Module()
        differentiates = False

        def forward(self, ids_BT, logits):
            return SimpleNamespace(logits=torch.zeros(*ids_BT.shape, 16))

    sizes = TokenBytes(np.arange(16, dtype=np.int32), 0, frozenset())
    samples = [Sample((3, 4, 5, 6), "a", "-", replaced=(4, 2))]  # the first is no target
    found = run(
        Uniform(), Recorder([1], ()), samples, AnalysisOptions(batch_size=1), token_bytes=sizes
    )
    (measured,) = found.samples
    assert (measured.targets, measured.bytes) == (3, 4 + 6)
    assert measured.nats == pytest.approx(3 * np.log(16))
    assert measured.nats_of_bytes == pytest.approx(2 * np.log(16))


def test_sequences_are_cut_at_random_lengths_evenly_and_by_the_seed():
    long = [Sample(tuple(range(40)), "texts", f"text {n}") for n in range(4000)]
    cut = cut_at_random(long, (10, 13), seed=1)
    lengths = np.array([len(sample.tokens) for sample in cut])
    assert all(a.tokens == b.tokens[: len(a.tokens)] for a, b in zip(cut, long, strict=True))
    counts = np.bincount(lengths)[10:]
    assert len(counts) == 4
    # A share of 1/4 of 4,000 has a standard deviation of 27.
    assert abs(counts - 1000).max() < 5 * 27
    assert cut == cut_at_random(long, (10, 13), seed=1)
    assert cut != cut_at_random(long, (10, 13), seed=2)
    short = [Sample((1, 2, 3), "texts", "text")]
    assert cut_at_random(short, (10, 13), seed=1) == short


class Doubled:
    """A tokenizer that puts BOS twice."""

    bos_token_id, name_or_path = 7, "doubled"

    def encode(self, text, add_special_tokens=True, split_special_tokens=True):
        return ([7, 7] if add_special_tokens else []) + [10 + len(w) for w in text.split()]


def test_bos_is_added_once():
    def ids(tokenizer, bos):
        return Reader(tokenizer, bos).read("a text", "a.txt")

    with pytest.raises(UserError, match="adds its BOS token 7 twice"):
        ids(Doubled(), "auto")
    assert ids(Doubled(), "none") == [11, 14]
    once = Doubled()
    once.encode = lambda text, **_: [10 + len(w) for w in text.split()]
    assert ids(once, "auto") == [11, 14]
    assert ids(once, "add") == [7, 11, 14]
    assert dataset_names(["a/x.txt", "b/y.txt", "c/x.txt"]) == ["a/x.txt", "y", "c/x.txt"]
    made = dataset_names(["random.txt", "repeated"])  # no name of made-up tokens
    assert made == ["random.txt", str(Path("repeated").absolute())]
