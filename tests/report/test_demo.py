"""The language of the demo, its flags, and its picture."""

from itertools import pairwise

import numpy as np

from megasink.commands import demo
from megasink.data.tokenizer import load_tokenizer
from megasink.data.trigger_language import LETTERS, TriggerLanguage, write_tokenizer
from megasink.train import early


def test_behind_a_trigger_stands_the_letter_before_it():
    language = TriggerLanguage()
    texts = list(language.documents(200))
    triggers, copied = np.sum([language.copies(text) for text in texts], axis=0)
    assert triggers == copied > 100
    assert language.copies("xaxyax") == (2, 1)
    assert {len(text) for text in texts} == {62}
    assert texts == list(language.documents(200))
    assert texts != list(language.documents(200, seed=11))
    assert texts != list(TriggerLanguage(chain=1).documents(200))


def test_letters_follow_the_chain():
    language = TriggerLanguage()
    text = [letter for text in language.documents(4000) for letter in (*text, None)]
    counts = np.zeros((len(LETTERS), len(LETTERS)))
    for letter, behind in pairwise(text):
        if letter and behind and letter not in LETTERS[:4]:
            counts[LETTERS.index(letter), LETTERS.index(behind)] += 1
    seen = counts.sum(1) > 3000
    shares = counts[seen] / counts[seen].sum(1, keepdims=True)
    assert seen.sum() > 5
    assert np.abs(shares - language.transitions()[seen]).max() < 0.03


def test_every_letter_is_a_token(tmp_path):
    write_tokenizer(tmp_path)
    ids = load_tokenizer(tmp_path)(LETTERS)["input_ids"]
    assert ids == [0, *range(2, 2 + len(LETTERS))]


def test_the_trainer_takes_the_flags():
    for coeff in demo.RUNS.values():
        flags = [*demo.FLAGS.split(), "--head-balance-coeff", coeff, "--train-iters", "10"]
        assert early.read(flags).flag_problems == []
