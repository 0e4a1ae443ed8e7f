"""examples/real_models/importance.py on made-up losses whose answers are known."""

import json

import numpy as np
import pytest
from scipy.stats import spearmanr

from examples.real_models import importance
from examples.real_models.importance import Losses, compare, kept_share, reachable, read_losses
from megasink.errors import UserError
from megasink.files.checked_fields import to_json


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(importance, "DRAWS", 100)


def made_up(noise=0.0, layers=4, heads=6, texts=10):
    random = np.random.default_rng(1)
    score = random.random((layers, heads))
    rise = score[..., None] ** 3 + noise * random.normal(size=(layers, heads, texts))
    return score, rise


@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_rank_correlations_are_scipys():
    random = np.random.default_rng(0)
    score, rise = random.integers(0, 5, (4, 9)).astype(float), random.random((4, 9))
    score[2] = 1
    expected = [spearmanr(s, r).statistic for s, r in zip(score, rise, strict=True)]
    np.testing.assert_allclose(importance.within_layers(score, rise), expected)
    together = spearmanr(score.ravel(), rise.ravel()).statistic
    assert importance.rank_correlation(score.ravel(), rise.ravel()) == pytest.approx(together)


def test_a_perfect_score_and_its_opposite():
    score, rise = made_up()
    found = compare(score, rise)
    assert found["all"] == found["within"] == pytest.approx(1)
    assert found["all_interval"] == found["within_interval"] == pytest.approx([1, 1])
    assert found["by_layer"] == [1] * 4
    assert compare(-score, rise)["all"] == pytest.approx(-1)
    best = np.sort(rise.mean(-1).ravel())[::-1]
    assert found["kept"] == pytest.approx(best[:12].sum() / best.sum())
    assert found["kept_within"] <= found["kept"]
    assert reachable(rise)["all"] == pytest.approx(1)


def test_noise_lowers_what_can_be_reached_and_widens_intervals():
    score, rise = made_up(noise=2.0)
    found = compare(score, rise)
    assert np.ptp(found["all_interval"]) > 0.2
    assert reachable(rise)["all"] < 0.5


def test_equal_scores_are_chance():
    rise = np.array([4.0, 0.0, 2.0, 2.0])
    assert kept_share(np.ones(4), rise) == 0.5
    assert kept_share(np.array([2.0, 2.0, 1.0, 1.0]), rise) == 0.5
    assert kept_share(rise, rise) == 0.75


def test_a_score_by_depth_alone_says_nothing_within_layers():
    _, rise = made_up()
    found = compare(np.arange(4.0)[:, None] * np.ones(6), rise)
    assert np.isnan(found["within"])
    assert np.isnan(found["by_layer"]).all()
    assert np.isnan(found["within_interval"]).all()
    assert to_json(found)["by_layer"] == [None] * 4


def test_partial_results_are_whole_blocks_and_say_so(tmp_path):
    path = tmp_path / "zeroing-a.jsonl"
    lines = [{"weights": "w", "layers": 2, "unit": 0.5}]

    def write(*more):
        lines.extend(more)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    write({"block": 0, "loss": [2, 4]})
    with pytest.raises(UserError, match="nothing is measured yet"):
        read_losses(path)
    write({"block": 0, "layer": 0, "rise": [[1, 3]], "kl": [4]})
    losses = read_losses(path)
    assert losses.part == "partial: 2 of 240 texts, layers 0 to 0 of 2"
    write({"block": 0, "layer": 1, "rise": [[0, 2]], "kl": [6]}, {"block": 1, "loss": [6, 8]})
    with path.open("a") as file:
        file.write('{"block":1,"lay')
    losses = read_losses(path)
    assert losses.part == "partial: 2 of 240 texts"
    np.testing.assert_array_equal(losses.rise_LHN, [[[0.5, 1.5]], [[0, 1]]])
    np.testing.assert_array_equal(losses.kl_LHM, [[[2]], [[3]]])
    np.testing.assert_array_equal(losses.loss_N, [1, 2])
    assert Losses("w", np.zeros((2, 1, 240)), np.zeros((2, 1, 80)), np.zeros(240), 2).part == ""


def test_scores_are_high_for_important_heads(tmp_path):
    scores = {n: [[1.0, 2.0]] for n in ("awft", "ahon", "importance", "mask_gradient", "aeqd")}
    (tmp_path / "scores-a.json").write_text(json.dumps({"weights": "w", "scores": scores}))
    found = importance.read_scores(tmp_path / "scores-a.json", "w")
    assert found["awft"].tolist() == [[-1, -2]]
    assert found["ahon"].tolist() == [[1, 2]]
    assert found["mask_gradient_low_entropy"].tolist() == [[0.5, 0.5]]
    assert found["mask_gradient_high_entropy"].tolist() == [[0, 1]]
    with pytest.raises(UserError, match="is of other weights than the losses: move it away"):
        importance.read_scores(tmp_path / "scores-a.json", "other")
