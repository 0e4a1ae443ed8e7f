"""The languages of letters: what follows what, and how well it can be predicted."""

import json

import numpy as np
import pytest

from examples.replicate.languages import (
    SAMPLE,
    RetrievalLanguage,
    write_retrieval,
    write_triggers,
)
from megasink.cli.demo_runs import (
    LETTERS,
    TriggerLanguage,
    texts_of,
    write_tokenizer,
)
from megasink.data.hf_tokenizer import leading_ids, load_tokenizer
from megasink.data.indexed_dataset import sequence_lengths


def test_behind_a_trigger_stands_what_stood_before_it():
    language = TriggerLanguage(triggers=4)
    ids = language.sample(200, 62, seed=10)
    last, before, next_ = ids[:, 1:-1], ids[:, :-2], ids[:, 2:]
    assert (last < 4).sum() > 100
    assert (next_ == before)[last < 4].all()
    counts = [language.copies(text) for text in texts_of(ids)]
    assert sum(found for found, _ in counts) == (last < 4).sum()
    assert all(found == copied for found, copied in counts)
    assert language.copies("xaxyax") == (2, 1)
    assert (ids == language.sample(200, 62, seed=10)).all()
    assert (ids != TriggerLanguage(chain=1).sample(200, 62, seed=10)).any()


def test_a_key_that_returns_is_followed_by_its_value():
    language = RetrievalLanguage()
    first_value = language.value_ids[0]
    for row in language.sample(100, 62, seed=1, pairs=4, queries=4):
        at = np.flatnonzero((row >= language.filler) & (row < first_value))
        assert len(at) == 8
        values = {}
        for place in at:
            assert row[place + 1] in language.value_ids
            assert values.setdefault(row[place], row[place + 1]) == row[place + 1]
        assert len(values) == 4


@pytest.mark.parametrize("distance", [2, 3, 30, 59, 61])
def test_a_probe_asks_for_the_value_at_its_distance(distance):
    language = RetrievalLanguage()
    ids, answers = language.probes(50, 62, distance, seed=2, pairs=4)
    place = 62 - 1 - distance
    assert (ids[:, -1] == ids[:, place]).all()
    assert (ids[:, place + 1] == answers).all()
    is_key = (ids >= language.filler) & (ids < language.value_ids[0])
    assert (is_key.sum(1) == 5).all()  # four pairs and the query
    assert ((ids == ids[:, -1:]).sum(1) == 2).all()  # no other pair has the key


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="65 letters: use 2 to 64"):
        TriggerLanguage(letters=65)
    with pytest.raises(ValueError, match="triggers 8: use 0 to 7"):
        TriggerLanguage(letters=8, triggers=8)
    with pytest.raises(ValueError, match="distance 62: 2 to 61"):
        RetrievalLanguage().probes(1, 62, 62, seed=0)
    with pytest.raises(ValueError, match="length 15: 16 letters"):
        RetrievalLanguage().sample(1, 15, seed=0)
    with pytest.raises(ValueError, match="pairs 17: 1 to 16"):
        RetrievalLanguage().sample(1, 99, seed=0, pairs=17)


def test_the_tokenizer_has_the_letters_bos_and_eod(tmp_path):
    write_tokenizer(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert len(tokenizer) == len(LETTERS) + 2
    ids = tokenizer(LETTERS, add_special_tokens=False).input_ids
    assert len(set(ids)) == len(LETTERS)
    assert tokenizer.decode(ids) == LETTERS
    assert leading_ids(tokenizer) == [tokenizer.bos_token_id]


@pytest.mark.parametrize("length", [62, 125])
def test_held_out_text_is_cut_as_training_cuts_it(length, tmp_path):
    """Of documents that fill a sample each begins with BOS, of others next to none."""
    write_triggers(tmp_path, "corpus", documents=SAMPLE + 6, length=length)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    cut = [json.loads(line)["text"] for line in (tmp_path / "corpus-cut.jsonl").open()]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in cut]
    assert [len(row) for row in ids] == [64] * SAMPLE
    begin = [row[0] == tokenizer.bos_token_id for row in ids]
    assert sum(begin) == (SAMPLE if length == 62 else 1)
    documents = [json.loads(line)["text"] for line in (tmp_path / "corpus-sample.jsonl").open()]
    rows = [[0, *tokenizer(d, add_special_tokens=False).input_ids, 1] for d in documents]
    assert [i for row in ids for i in row] == [i for row in rows for i in row][: 64 * SAMPLE]


@pytest.mark.parametrize("write", [write_triggers, write_retrieval])
def test_a_document_fills_a_sample(write, tmp_path):
    write(tmp_path, "corpus", documents=SAMPLE + 6)
    lengths = sequence_lengths(str(tmp_path / "corpus"))
    assert lengths is not None
    assert lengths.tolist() == [64] * 6
    told = {
        name: [json.loads(line)["text"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("corpus.jsonl", "corpus-sample.jsonl")
    }
    assert [len(texts) for texts in told.values()] == [6, SAMPLE]
    assert not set(told["corpus.jsonl"]) & set(told["corpus-sample.jsonl"])
    with pytest.raises(ValueError, match="64 documents: more than the 64"):
        write(tmp_path, "corpus", documents=SAMPLE)
