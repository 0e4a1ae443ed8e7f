"""Thresholds, agreement, distances, the circuit, token sequences and components.

Shapes: N samples, L layers, H heads, T tokens, P positions, E hidden size.
"""

import numpy as np
import pytest
import torch

from megasink.analysis.capture.input_samples import (
    random_sequences,
    repeat_rate,
    repeated_first_token,
)
from megasink.analysis.metrics.circuit import (
    STAGES,
    circuit_stage,
    prominent_after_block,
    sink_centre,
    sink_centre_by_direction,
)
from megasink.analysis.metrics.head_scores import layer_normalized, random_scores
from megasink.analysis.metrics.inactive_heads import (
    agreement,
    inactive,
    least_active,
    published_quantile,
    share_by_layer,
    spearman,
    threshold,
    top_agreement,
    wasserstein,
)
from megasink.analysis.metrics.pca_tsne import (
    attention_map_components,
    principal_components,
    query_key_components,
)
from megasink.analysis.metrics.registry import OVER_SAMPLES, SCALARS
from megasink.analysis.metrics.residual_stream import MeanCosine, mean_cosine
from megasink.analysis.metrics.sinks import sink_rate
from megasink.balance.loss import layer_imbalance

NAN = float("nan")


def test_the_published_quantile_rule():
    scores = np.array([4.0, 1.0, NAN, 2.0, 8.0])  # F(1) = .25, F(2) = .5, F(4) = .75, F(8) = 1
    for share, expected in (
        (0.0, 1.0),
        (0.25, 1.0),
        (0.3, 1.2),
        (0.5, 2.0),
        (0.9, 6.4),
        (1.0, 8.0),
    ):
        assert published_quantile(scores, share) == pytest.approx(expected)
        numpys = np.nanquantile(scores, max(share, 0.25), method="interpolated_inverted_cdf")
        assert published_quantile(scores, share) == pytest.approx(numpys, rel=1e-12)
    assert published_quantile(scores, 0.5) != np.nanquantile(scores, 0.5)
    assert threshold(scores, 0.25, "below") == 1.0
    assert threshold(scores, 0.25, "above") == 4.0  # exceeded by a quarter
    assert inactive(scores, 4.0, "above").tolist() == [False, False, False, False, True]
    assert inactive(scores, 2.0, "below").tolist() == [False, True, False, False, False]
    with pytest.raises(ValueError, match="share 15"):
        published_quantile(scores, 15)
    with pytest.raises(ValueError, match="no score"):
        published_quantile(np.array([NAN]), 0.5)


def test_masks_and_how_much_they_agree():
    scores = np.array([[[0.1, 0.9], [0.5, NAN]]])
    assert least_active(scores, 0.34, "below").tolist() == [[[True, False], [False, False]]]
    assert least_active(scores, 0.67, "above").tolist() == [[[False, True], [True, False]]]
    a, b = np.array([1, 1, 1, 0], dtype=bool), np.array([0, 1, 1, 1], dtype=bool)
    few, none = np.array([0, 1, 0, 0], dtype=bool), np.zeros(4, dtype=bool)
    iou, of_row = agreement([a, b, few, none])
    assert iou.tolist()[:3] == [[1, 0.5, 1 / 3, 0], [0.5, 1, 1 / 3, 0], [1 / 3, 1 / 3, 1, 0]]
    assert of_row.tolist()[:3] == [[1, 2 / 3, 1 / 3, 0], [2 / 3, 1, 1 / 3, 0], [1, 1, 1, 0]]
    assert np.isnan(iou[3, 3])
    assert np.isnan(of_row[3]).all()
    same = [least_active(scores, 0.67, "below"), least_active(-scores, 0.67, "above")]
    iou, of_row = agreement(same)
    assert iou.tolist() == of_row.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert share_by_layer(scores < 0.3, scores).tolist() == [0.5, 0.0]


def test_normalised_and_random_scores():
    scores = torch.tensor([[[1.0, 3.0], [2.0, NAN]]])
    assert layer_normalized(scores)[0, 0].tolist() == [0.5, 1.5]
    assert layer_normalized(scores)[0, 1, 0] == 1.0
    drawn = random_scores((50, 40), seed=1)
    assert torch.equal(drawn, random_scores((50, 40), seed=1))
    assert abs(float((drawn < 0.05).double().mean()) - 0.05) < 0.015


def test_importance_imbalance_and_sink_rate():
    gate = torch.tensor([[[0.2, 0.4]], [[0.8, 0.4]]])  # two samples of 1 and 3 tokens
    importance = OVER_SAMPLES["mean over tokens"](gate, torch.tensor([1, 3]))
    torch.testing.assert_close(importance, torch.tensor([[0.65, 0.4]]))
    table = torch.tensor([[1.0, 3.0], [2.0, 2.0], [NAN, NAN], [0.0, 0.0]])
    assert layer_imbalance(table)[:2].tolist() == [0.5, 0.0]
    assert layer_imbalance(table)[2].isnan()
    assert layer_imbalance(table)[3] == 0.0
    assert float(layer_imbalance(table).nanmean()) == pytest.approx(0.5 / 3)
    alpha = torch.tensor([[[0.31, 0.3]], [[0.9, NAN]]])
    assert float(sink_rate(alpha)) == pytest.approx(2 / 3)  # strictly above, blanks left out


def test_how_samples_and_axes_become_one_number():
    values, tokens = torch.tensor([[1.0], [4.0], [2.0]]), torch.tensor([1, 1, 2])
    found = {name: float(reduce(values, tokens)) for name, reduce in OVER_SAMPLES.items()}
    wanted = {"mean": 7 / 3, "mean over tokens": 2.25, "min": 1.0, "max": 4.0, "median": 2.0}
    assert found == pytest.approx(wanted)
    # The embedding, then the state after attention and the output of each of three blocks.
    states = torch.tensor([9.0, 7.0, 1.0, 8.0, 3.0, 6.0, NAN])
    found = {name: float(number(states)) for name, number in SCALARS.items()}
    of_blocks = {"mean over block outputs": 2.0, "max over block outputs": 3.0}
    assert found == pytest.approx({"mean": 34 / 6, "first": 9.0, **of_blocks})


def test_cosine_across_inputs():
    samples = [torch.randn(n, 6) + 1.0 for n in (5, 5, 3, 1)]
    mean = MeanCosine(2, 4)
    for sample in samples:
        mean.add(1, sample)
    cosine = mean_cosine(mean.unit_sum_SPE, mean.count_SP)
    assert cosine[0].isnan().all()
    for position in range(4):
        rows = torch.stack([s[position] for s in samples if len(s) > position]).double()
        table = torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=-1)
        expected = table[~torch.eye(len(rows), dtype=torch.bool)].mean()
        torch.testing.assert_close(cosine[1, position], expected)
    none = MeanCosine(1, 2)
    assert mean_cosine(none.unit_sum_SPE, none.count_SP).isnan().all()


def test_distances_between_models():
    a, b = np.array([0.0, 1.0, NAN]), np.array([0.5, 2.5, 3.0, 4.0])
    # Quantile by quantile: 0 with 0.5 and 2.5, 1 with 3 and 4.
    assert wasserstein(a, b) == pytest.approx((0.5 + 2.5 + 2 + 3) / 4, rel=1e-12)
    assert wasserstein(b, b) == 0.0
    x, y = np.array([[1.0, 2.0, 2.0, 9.0]]), np.array([[0.0, 5.0, 4.0, 3.0]])
    ranks = np.corrcoef([1, 2.5, 2.5, 4], [1, 4, 3, 2])[0, 1]
    assert spearman(x, y) == pytest.approx(ranks, rel=1e-12)
    assert np.isnan(spearman(x, np.ones((1, 4))))
    assert top_agreement(x, y, 2) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match=r"shapes \(1, 4\) and \(4,\)"):
        spearman(x, y[0])


def test_where_the_sink_becomes_prominent():
    def after(ratios, attention):
        states = torch.tensor([9.0, *(r for ratio in ratios for r in (99.0, ratio))])
        return float(prominent_after_block(states, torch.tensor(attention)))

    assert after([1.0, 60.0, 80.0], [0.9, 0.1, 0.7]) == 1
    assert np.isnan(after([1.0, 60.0, 80.0], [0.9, 0.1, 0.2]))
    assert after([9.0, 9.0, 9.0], [0.0, NAN, 0.7]) == 0
    alpha = torch.full((2, 3, 4), 0.1)
    alpha[:, :, 1] = 0.6
    alpha[1, 2] = NAN
    cosine = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.3, NAN], [0.2, 0.4, NAN]])
    assert float(sink_centre(alpha)) == float(sink_centre_by_direction(alpha, cosine)) == 1
    assert sink_centre_by_direction(alpha, cosine * NAN).isnan()
    stages = [
        STAGES[int(circuit_stage(torch.tensor(rate), torch.tensor(prominent), torch.ones(12)))]
        for rate, prominent in (
            ([0.01, 0.0], NAN),
            ([0.5, 0.3], 1.0),
            ([0.1, 0.6], NAN),
            ([0.6, 0.1], NAN),
            ([0.6, 0.1], 6.0),
            ([0.6, NAN], 2.0),
        )
    ]
    assert tuple(stages) == STAGES


def test_token_sequences():
    drawn = random_sequences(50, 20, range(10), seed=1, exclude=[0, 9])
    assert {token for row in drawn for token in row} == set(range(1, 9))
    assert drawn == random_sequences(50, 20, range(10), seed=1, exclude=[0, 9])
    assert repeated_first_token([5, 6, 7], 3, bos=None) == [5, 5, 5, 6, 7]
    assert repeated_first_token([5, 6, 7], 2, bos=1) == [1, 1, 5, 6, 7]
    with pytest.raises(ValueError, match="copies 0"):
        repeated_first_token([5, 6, 7], 0, bos=1)
    with pytest.raises(ValueError, match="all 3 tokens"):
        random_sequences(1, 1, range(3), seed=0, exclude=[0, 1, 2])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_repeat_rate(n):
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 3, size).tolist() for size in (40, 1, 17)]
    grams = [d[i : i + n] for d in documents for i in range(len(d) - n + 1)]
    expected = sum(len(set(gram)) == 1 for gram in grams) / len(grams)
    assert 0 < expected < 1
    assert repeat_rate(documents, n) == pytest.approx(expected)
    with pytest.raises(ValueError, match="no document"):
        repeat_rate([[1]], n)


def test_principal_components():
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(30, 5)) * np.array([5.0, 3.0, 1.0, 0.5, 0.1]) + 7.0
    points, explained = principal_components(rows)
    values, vectors = np.linalg.eigh(np.cov(rows.T))
    np.testing.assert_allclose(explained, values[::-1][:2] / values.sum())
    expected = (rows - rows.mean(0)) @ vectors[:, ::-1][:, :2]
    np.testing.assert_allclose(np.abs(points), np.abs(expected), atol=1e-9)
    query, key = rows[:10], rows[10:] + 3.0
    q, k, shares = query_key_components(query, key)
    assert q.shape == (10, 2)
    assert k.shape == (20, 2)
    np.testing.assert_allclose(np.concatenate([q, k]).mean(0), 0.0, atol=1e-12)
    assert 0 < shares[1] <= shares[0] < 1
    with pytest.raises(ValueError, match="are equal"):
        principal_components(np.ones((3, 2)))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_principal_components_of_attention_maps(dtype):
    generator = np.random.default_rng(0)
    maps = generator.random((9, 4, 4)).astype(dtype) * np.linspace(0.2, 3, 16).reshape(4, 4)
    maps = maps.astype(dtype)
    found = attention_map_components(maps)
    points, explained = principal_components(maps.reshape(9, 16).astype(np.float64))
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype is np.float64 else {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(found.points_MC, points, **close)
    np.testing.assert_allclose(found.explained_C, explained, **close)
    np.testing.assert_allclose(np.square(found.images_CTT).sum((1, 2)), 1.0, **close)
    centred = (maps - maps.mean(0)).reshape(9, 16)
    np.testing.assert_allclose(centred @ found.images_CTT.reshape(2, 16).T, points, **close)
    with pytest.raises(ValueError, match="of 1 matrix"):
        attention_map_components(maps[:1])
    with pytest.raises(ValueError, match="are equal"):
        attention_map_components(np.repeat(maps[:1], 5, 0))
