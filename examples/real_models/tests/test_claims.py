"""What real_models/claims.py measures: by its definition, and on a tiny model from end to end."""

import json
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.real_models import analyses, changes, claims, numbers, numbers_circuit, page
from examples.real_models.analyses import Samples, Subject
from examples.real_models.tests.conftest import sentences
from examples.real_models.texts import Text, read_texts
from megasink.cli import main as megasink


class Made:
    """Values by text that are made up, in the place of an analysis."""

    def __init__(self, **arrays):
        self.arrays = {f"metric/{name}": np.array(value) for name, value in arrays.items()}

    def samples(self, _which):
        count = len(next(iter(self.arrays.values())))
        return Samples(self.arrays, np.array(["a", "b"] * count)[:count])


def test_every_claim_has_a_number_and_every_number_a_claim():
    named = [name for claim in claims.claims() for name in claim.numbers]
    assert sorted(named) == sorted(numbers.NUMBERS)
    assert all(claim.says and claim.published and claim.predicted for claim in claims.claims())


def test_without_bos_there_is_no_number_with_it():
    """Not that of copies of the first token, which is another claim."""
    made = Made(awft=[[[0.9]]])
    made.has_bos = False
    assert np.isnan(numbers.NUMBERS["sink_rate_bos"](made)).all()
    assert np.isnan(numbers.NUMBERS["copies_of_bos"](made)).all()


def test_rates_are_of_each_text_and_domain():
    made = Made(awft=[[[0.2, 0.4]], [[0.31, 0.9]], [[0.3, 0.1]], [[0.5, 0.6]]])
    np.testing.assert_allclose(numbers.sink_rate(made), [0.5, 1, 0, 1])
    assert numbers.sink_rate_between_domains(made) == 0.75  # a: 0.5 and 0, b: 1 and 1


def test_the_jump_is_where_most_texts_have_it():
    ratio = np.ones((3, 7))  # states of three blocks
    ratio[:, 4] = 6, 7, 1
    ratio[:, 6] = 50
    norm = np.zeros((3, 7, 1))
    norm[:, 2:5, 0] = 1, 2, 11
    made = Made(massive_ratio=ratio, state_norm=norm)
    np.testing.assert_array_equal(numbers_circuit.first_long_block(made), [1, 1, 2])
    assert numbers_circuit.jump_of(made) == 1
    np.testing.assert_allclose(numbers_circuit.mlp_share_of_jump(made), 0.9)
    flat = Made(massive_ratio=np.ones((3, 7)), state_norm=norm)
    assert np.isnan(numbers_circuit.first_long_block(flat)).all()
    assert numbers_circuit.jump_of(flat) is None
    assert np.isnan(numbers_circuit.mlp_share_of_jump(flat)).all()


@pytest.mark.parametrize(
    ("norms", "first_ratio", "block"),
    [
        ((1, 50, 8, 8, 30, 28, 999), 9, 3),  # the first growth is gone again
        ((1, 50, 26, 26, 30, 28, 999), 9, 0),  # half of it stays
        ((1, 50, 26, 26, 30, 28, 999), 4, 3),  # it stays, but is not long beside the others
    ],
)
def test_the_block_of_the_jump_is_the_largest_growth_that_lasts(norms, first_ratio, block):
    """Of six blocks; the last growth is in the last third."""
    ratio, norm = np.full((2, 13), 9.0), np.zeros((2, 13, 1))
    norm[:, ::2, 0], ratio[:, 2] = norms, first_ratio
    made = Made(massive_ratio=ratio, state_norm=norm)
    np.testing.assert_array_equal(numbers_circuit.lasting_block(made), [block, block])


def test_long_states_elsewhere_and_their_sinks():
    norm = np.ones((1, 13, 9))
    norm[0, 10, 3] = 8  # output of block 4 of 6, the first of the last third
    alpha = np.zeros((1, 6, 2, 9))
    alpha[0, 5, 0, 3] = 0.9
    made = Made(state_norm=norm, alpha=alpha)
    np.testing.assert_allclose(numbers_circuit.elsewhere_ratio(made), 8)
    np.testing.assert_allclose(numbers_circuit.elsewhere_sink(made), 0.5)


@pytest.mark.parametrize(
    ("text", "begins"),
    [("One. Two", True), ("One! Two", True), ("x.y", False), ("One, two", False), ("a? \nB", True)],
)
def test_where_sentences_begin(text, begins):
    assert changes._begins(text, len(text) - len(text.split()[-1])) == begins
    assert not changes._begins(text, 0)


def test_an_interval_is_that_of_the_mean_over_texts():
    values = np.random.default_rng(1).normal(3, 1, 400)
    found = claims.measured([*values, np.nan])
    assert found["texts"] == 400
    assert found["number"] == pytest.approx(values.mean())
    low, high = found["interval"]
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.1)
    assert claims.measured(2.0) == {"number": 2.0, "interval": None, "texts": None}
    assert np.isnan(claims.measured(np.full(1, np.nan))["number"])


def test_numbers_on_the_page():
    assert page.value_of({"number": None, "interval": None}) == "–"
    assert page.value_of({"number": 0.0, "interval": [-0.01234, 0.5]}) == "0 (-0.012 to 0.500)"
    assert page.rounded(13826.4) == "13,826"
    assert page.rounded(3.14159) == "3.14"


def command(*words):
    assert megasink([*words]) == 0


@pytest.fixture
def measured(model, monkeypatch):
    """Everything, of the tiny model; commands run in this process."""
    draw, words = random.Random(1), [f"{a}{b}ing " for a in "bcdfgh" for b in "aeiou"]
    long = [Text("other", "", "", sentences(draw, words, 600)) for _ in range(2)]
    monkeypatch.setattr(analyses, "long_texts", lambda: long)
    monkeypatch.setattr(changes, "long_texts", lambda: long)
    monkeypatch.setattr(analyses, "LENGTHS", {False: (64,), True: (64,)})
    monkeypatch.setattr(numbers, "LENGTHS", analyses.LENGTHS)
    monkeypatch.setattr(analyses, "SCORES", ("awft", "ahon", "ahon_ln", "circuit_ahon_ln"))
    monkeypatch.setattr(analyses, "QUESTIONS", 4)
    monkeypatch.setattr(analyses, "DRAWN", (10, 64))
    monkeypatch.setattr(analyses, "command", command)
    assert claims.main([str(model)]) == 0
    (found,) = json.loads((model.parent / "runs/real-models/claims.json").read_text())
    return model, found


def test_from_a_folder_to_the_picture(measured):
    model, found = measured
    folder = model.parent / "runs/real-models"
    assert (folder / "claims.png").read_bytes().startswith(b"\x89PNG")
    assert found["numbers"]["sink_rate"]["texts"] == 6
    # A tiny model has no sliding window.
    assert found["numbers"]["window_first_key"]["number"] is None
    assert found["numbers"]["sink_rate_of_later_sentences"]["number"] is not None

    # The same from transformers alone: attention maps and hidden states of the eager model.
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    ids = torch.tensor([tokenizer(t.text)["input_ids"][:64] for t in read_texts()[:6]])
    with torch.no_grad():
        out = plain(ids, output_attentions=True, output_hidden_states=True)
    maps = torch.stack(out.attentions, 1).double()  # [text, layer, head, query, key]
    rate = (maps[..., 0].mean(-1) > 0.3).double().mean((1, 2))
    expected = {"sink_rate": rate.mean(), "square_sum": maps[:, 0, :, -1].square().sum(-1).mean()}
    # The last of hidden_states is after the final norm.
    norms = torch.stack(out.hidden_states[1:-1], 1).norm(dim=-1)
    ratio = norms[..., 0] / norms[..., 1:].mean(-1)
    shown = found["curves"]["massive_ratio"][2:-2:2]
    np.testing.assert_allclose(shown, ratio.mean(0), rtol=1e-4)
    starts = [[k for k in range(1, 32) if k % 9 == 0] for _ in range(6)]  # eight words and a stop
    alpha = maps.sum(-2) / torch.arange(64, 0, -1)
    later = [(a[..., s] > 0.3).double().mean() for a, s in zip(alpha, starts, strict=True)]
    expected["sink_rate_of_later_sentences"] = torch.stack(later).mean()
    importance = 1 - maps[..., 0].mean((0, 3))
    expected["imbalance"] = (importance.std(-1, correction=0) / importance.mean(-1)).mean()
    for name, value in expected.items():
        assert found["numbers"][name]["number"] == pytest.approx(float(value), abs=1e-4), name
    assert changes.sentence_starts(Subject(model)) == starts

    before = (folder / "claims.json").read_bytes()
    assert claims.main([str(model)]) == 0  # nothing is measured again
    assert (folder / "claims.json").read_bytes() == before


def test_the_page_is_what_the_results_say():
    assert page.PAGE.read_text() == page.page()
    for name in ("claims.png", "importance.png"):
        picture = page.PAGE.parent / page.PICTURES / name
        assert picture.read_bytes() == (page.RESULTS / name).read_bytes()
    assert all(claim.verdict for claim in claims.claims())
