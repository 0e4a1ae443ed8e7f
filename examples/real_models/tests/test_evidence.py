"""README's "Does it help?" and the page's summary are what the results files say."""

import json
import re
from pathlib import Path

import pytest

from examples.real_models.claims import claims
from examples.real_models.expected import count_of, held, met
from examples.real_models.page import standing
from examples.real_models.training import by_seed, difference
from examples.real_models.zeroing import RESULTS
from examples.replicate import record

ROOT = Path(__file__).parents[3]
SECTION = " ".join(
    (ROOT / "README.md").read_text().partition("## Does it help?")[2].partition("\n## ")[0].split()
)


@pytest.fixture(scope="module", name="full")
def full_forms():
    """Letter of an experiment -> its full form."""
    return {each.experiment[0]: each for each in record.read_results() if each.form == "full"}


def counts(result, verdict):
    return sum(v.verdict == verdict for v in result.verdicts)


def test_experiments(full):
    a, b, c, d, e = (full[letter] for letter in "abcde")
    gated = {cell: sum(a.cells[f"gated, {cell}"]["imbalance"]) / 3 for cell in ("no loss", "loss")}
    assert f"from {gated['no loss']:.3f} to {gated['loss']:.3f} in gated attention" in SECTION
    lowers = [v for v in a.verdicts if v.says.startswith("The loss lowers the head imbalance")]
    assert [v.difference > 0 and v.corrected > 0.05 for v in lowers] == [True] * 3
    assert f"correction for {len(a.verdicts)} claims" in SECTION
    for name in ("vanilla", "sink", "gated"):
        (v,) = (
            v for v in a.verdicts if v.says.startswith(f"The loss improves validation of {name}")
        )
        assert re.search(rf"{v.low:.2f} to {v.high:.2f}[^(]* \({name}", SECTION)
    gates = [
        v for v in c.verdicts if re.search("^A.* gate .*improves validation$|^A SiLU gate", v.says)
    ]
    before = sum(v.p < 0.05 for v in gates)
    after = sum(v.verdict == "reproduces" for v in gates)
    assert (
        f"with {before} of {len(gates)} forms the validation loss is lower than without" in SECTION
    )
    assert f"with {after} after correction for {len(c.verdicts)} claims" in SECTION
    gains = [v.difference for v in gates if v.p < 0.05]
    assert f"The {before} gain {min(gains):.1f} to {max(gains):.1f} nats" in SECTION
    assert f"{counts(b, 'reproduces')} of P2's {len(b.verdicts)} claims hold" in SECTION
    assert counts(b, "opposite") == 0
    assert (
        f"Of P4's {len(e.verdicts)} claims, {counts(e, 'reproduces')} holds and "
        f"{counts(e, 'opposite')} are reversed"
    ) in SECTION
    assert f"P3's scores**: {counts(d, 'reproduces')} of {len(d.verdicts)} claims hold" in SECTION
    for name in ("vanilla", "sink"):
        areas = d.cells[f"{name}, no loss"]
        pairs = zip(areas["ablation/awft/auc"], areas["ablation/random/auc"], strict=True)
        assert all(awft > random for awft, random in pairs)


def test_the_cost_of_the_loss(full):
    cells, verdicts = full["j"].cells, full["j"].verdicts
    means = {
        (metric, cell): sum(values[metric]) / len(values[metric])
        for cell, values in cells.items()
        for metric in ("valid_lm_loss", "imbalance")
    }
    within = {
        cell: next(
            v for v in verdicts if f"of {cell} leaves the validation loss of gated" in v.says
        )
        for cell in ("1e-4", "1e-3", "1e-2")
    }
    assert {cell: v.verdict == "reproduces" for cell, v in within.items()} == {
        "1e-4": True,
        "1e-3": True,
        "1e-2": False,
    }
    worst = within["1e-2"]
    cost = means["valid_lm_loss", "gated, 1e-2"] - means["valid_lm_loss", "gated, 0"]
    assert f"+{cost:.3f} nats (95 %: {worst.low:.3f} to {worst.high:.3f})" in SECTION
    zero, *others = (means["imbalance", f"gated, {c}"] for c in ("0", "1e-4", "1e-3", "1e-2"))
    assert "from {:.3f} to {:.3f}, {:.3f} and {:.3f}".format(zero, *others) in SECTION
    assert f"[{len(cells['gated, 0']['imbalance'])} seeds, in pairs]" in SECTION


def test_real_models():
    found = json.loads((RESULTS / "claims.json").read_text())
    rows, of = claims(), held(claims(), "smollm2")
    text = f"{of['yes']} hold in SmolLM2, {of['partly']} in part, {of['no']} do not"
    assert f"of all {len(rows)}, {text}" in SECTION
    assert f"Of {len(rows)} claims {text}" in "\n".join(standing(found))
    smollm2, _ = found
    shares = {"ahon_ln": "AHON (LN) can remove", "awft": "AWFT", "random": "random choice"}
    for score, words in shares.items():
        share = smollm2["numbers"][f"removable_{score}"]
        low, high = share["interval"]
        assert f"{words} {share['number']:.1f} % ({low:.1f} to {high:.1f})" in SECTION
    assert f"{len(rows) - len(shares)} further claims" in SECTION

    _, arms = by_seed(RESULTS / "balance-smollm2.jsonl")
    margin = "quiz, margin in nats per token"
    apart = difference(arms["eq7"][margin], arms["none"][margin])
    low, high = sorted(-x for x in apart["interval"])
    assert f"by {-apart['number']:.3f} nats ({low:.3f} to {high:.3f})" in SECTION
    assert low > 0


def test_an_expectation_is_met_or_missed():
    numbers = {"a": 0.5, "b": 0.3, "none": None, "each": [0.1, 0.4]}
    assert met(0.6, numbers, "a")  # a fifth less is just within
    assert met(0.45, numbers, "a")
    assert not met(0.4, numbers, "a")
    assert met([0.2, 0.5], numbers, "a")
    assert not met([0.2, 0.49], numbers, "a")
    assert met({"b": [0.1, 0.3]}, numbers, "a")
    assert not met({"": 0.5, "b": [0.3, 1]}, numbers, "a")
    assert met("none", numbers, "none")
    assert not met("none", numbers, "a")
    assert met([0, 0.4], numbers, "each")
    assert not met([0, 0.3], numbers, "each")
    assert met(-0.1, {"a": -0.11}, "a")
    with pytest.raises(ValueError, match="none was expected, and was not measured"):
        met([0, 1], numbers, "none")


def test_counts_follow_the_numbers():
    found = json.loads((RESULTS / "claims.json").read_text())
    expected, missed = count_of(claims(), found)
    found[0]["numbers"]["sink_rate_repeated"]["number"] = 1.0
    assert count_of(claims(), found) == (expected, missed + 1)
    assert sum(held(claims(), "smollm2").values()) == len(claims())
