"""From samples to results.json: numbers against calculations over the samples by themselves."""

import gc
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from megasink.analysis import measure
from megasink.analysis.analysis_summary import scores_of, summarize
from megasink.analysis.capture import probe
from megasink.analysis.capture.input_samples import Sample
from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.analysis.measure import Recorder, run
from megasink.analysis.metrics import STATISTICS
from megasink.analysis.metrics.registry import GRADIENT
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.result_schemas import RunFacts
from megasink.data.token_bytes import TokenBytes
from tests.analysis.capture.test_transformers import probed, tokens
from tests.analysis.capture.tiny_models import tiny_model

LENGTHS = (9, 12, 9, 5, 12)
SIZES = TokenBytes(np.arange(64, dtype=np.int32), 0, frozenset())  # token 0 has no byte


def analyzed(model, samples, **options):
    recorder = Recorder(
        [0 if layer is None else 4 for layer in range(2)],
        options=AnalysisOptions(positions=10, columns=4),
    )
    with TransformersProbe(model, recorder) as probe:
        recorder.heads[:] = probe.heads
        return run(probe, recorder, samples, AnalysisOptions(batch_size=2), **options)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", "eager")


@pytest.fixture(scope="module")
def samples():
    rows = [tokens(1, n, seed=n + i)[0].tolist() for i, n in enumerate(LENGTHS)]
    rows[1][6] = rows[1][5]  # one bigram of equal tokens
    return [Sample(tuple(row), "odd" if i % 2 else "even", f"s{i}") for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def captured(model, samples):
    return analyzed(model, samples, token_bytes=SIZES)


def summarised(measured, **options):
    facts = RunFacts(seed=3, data_sha256="0")
    return summarize(measured, measured.analysis_values(3), run=facts, **options)


@pytest.fixture(scope="module")
def results(captured, samples):
    return summarised(captured, model={"name": "tiny"}, inputs=samples)


@pytest.fixture(scope="module")
def found(results):
    """Metric -> its values."""
    return {name: result.values for name, result in results.metrics.items()}


@pytest.fixture(scope="module")
def alone(model, samples):
    """(weights [L, H, T, T], hidden states, logits) of each sample by itself, by transformers."""
    results = []
    for sample in samples:
        with torch.no_grad():
            told = model(
                torch.tensor([sample.tokens]),
                use_cache=False,
                output_attentions=True,
                output_hidden_states=True,
            )
        results.append((torch.cat(told.attentions).double(), told.hidden_states, told.logits[0]))
    return results


def test_samples_keep_their_order(captured, samples, alone):
    assert [s.source for s in captured.samples] == [s.source for s in samples]
    awft = np.stack([weights[..., 0].mean(-1).numpy() for weights, _, _ in alone])
    np.testing.assert_allclose(captured.values["awft"], awft, rtol=1e-5)
    alpha_1 = np.stack([w[..., 1:, 1].mean(-1).numpy() for w, _, _ in alone])
    np.testing.assert_allclose(captured.values["alpha"][..., 1], alpha_1, rtol=1e-5)


def test_importance_counts_tokens_and_not_samples(results, found, alone):
    shut = sum(weights[..., 0].sum(-1) for weights, _, _ in alone) / sum(LENGTHS)
    np.testing.assert_allclose(found["importance"], 1 - shut, rtol=1e-5)
    cv = (1 - shut).std(-1, correction=0) / (1 - shut).mean(-1)
    np.testing.assert_allclose(found["imbalance"], cv, rtol=1e-4)
    np.testing.assert_allclose(results.metrics["imbalance"].number, cv.mean(), rtol=1e-4)
    odd = [weights for i, (weights, _, _) in enumerate(alone) if i % 2]
    shut = sum(weights[..., 0].sum(-1) for weights in odd) / (12 + 5)
    np.testing.assert_allclose(
        results.datasets["odd"].metrics["importance"].values, 1 - shut, rtol=1e-5
    )


def test_loss_perplexity_and_bits_per_byte(found, samples, alone):
    nats = count = size = 0.0
    for sample, (_, _, logits) in zip(samples, alone, strict=True):
        for position, target in enumerate(sample.tokens[1:]):
            nats -= float(logits[position].double().log_softmax(-1)[target])
            count, size = count + 1, size + target
    assert found["nats_per_token"] == pytest.approx(nats / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_texts_count_once_in_the_average_perplexity(results):
    of = [results.datasets[name].metrics for name in ("even", "odd")]
    nats = [metrics["nats_per_token"].number for metrics in of]
    assert nats[0] != pytest.approx(nats[1], rel=1e-3)
    mean = (math.exp(nats[0]) + math.exp(nats[1])) / 2
    assert results.average_perplexity == pytest.approx(mean)
    assert results.perplexity_of_average_nats == pytest.approx(math.exp(sum(nats) / 2))


def test_sinks_on_any_token(results, found, alone):
    counts = {}
    for weights, _, _ in alone:
        tokens = weights.shape[-1]
        for head in weights.flatten(0, 1):
            alpha = [float(head[k:, k].mean()) for k in range(tokens // 2)]
            if max(alpha) > 0.3:
                where = str(int(np.argmax(alpha)))
                counts[where] = counts.get(where, 0) + 1
    assert set(counts) > {"0"}
    assert results.sink_positions == pytest.approx({k: n / 40 for k, n in counts.items()})
    assert found["sink_rate_anywhere"] == pytest.approx(sum(counts.values()) / 40)


def test_what_is_told_by_dataset(captured, results, samples):
    odd = results.datasets["odd"]
    awft = captured.values["awft"][[1, 3]]
    assert odd.score_quantiles["awft"][50] == pytest.approx(np.median(awft))
    grams = [pair for i in (1, 3) for pair in pairwise(samples[i].tokens)]
    assert odd.repeat_rate["2"] == sum(a == b for a, b in grams) / len(grams)


def test_states_by_position(found, captured, alone):
    norms = np.full((len(LENGTHS), 10), np.nan)
    ratios = []
    for row, (_, states, _) in enumerate(alone):
        norm = states[1][0].double().norm(dim=-1)
        norms[row, : len(norm)] = norm[:10]
        ratios.append(float(norm[0] / norm[1:].mean()))
    np.testing.assert_allclose(found["state_norm"][2], np.nanmean(norms, 0), rtol=1e-5)
    assert found["massive_ratio"][2] == pytest.approx(np.mean(ratios), rel=1e-5)
    states = torch.stack([states[1][0, 3] for _, states, _ in alone]).double()
    cosine = torch.nn.functional.cosine_similarity(states[:, None], states[None], dim=-1)
    pairs = cosine[~torch.eye(len(states), dtype=torch.bool)].mean()
    assert captured.cosine_SP[2, 3] == pytest.approx(float(pairs), rel=1e-5)
    maxima = torch.stack([x.abs().amax((0, 1, 2)) for x in [s[1] for _, s, _ in alone]])
    assert found["state_abs_max"][2] == pytest.approx(float(maxima.mean()), rel=1e-5)


def test_the_twelve_scores_and_their_relatives(captured, results):
    scores = scores_of(captured.analysis_values(3))
    assert len(scores) == 16
    ahon = captured.values["ahon"]
    np.testing.assert_allclose(scores["ahon_ln"], ahon / ahon.mean(-1, keepdims=True))
    np.testing.assert_allclose(scores["lthon_hn"], captured.values["lthon"] / ahon)
    tables = results.inactive_heads
    assert set(tables.thresholds) == set(scores)
    for name, values in scores.items():
        share = np.mean(tables.share_by_layer[name])
        assert share == pytest.approx(0.15, abs=2.5 / values.size), name  # groups tie
    assert np.diag(tables.agreement.iou) == pytest.approx(1.0)
    again = scores_of(captured.analysis_values(3))
    assert np.array_equal(again["random"], scores["random"])


def test_hybrid_layers_stay_blank():
    model = tiny_model("qwen3.5")
    recorder = Recorder([0, 0, 0, 4], options=AnalysisOptions(positions=4))
    samples = [Sample(tuple(tokens(1, 6, seed=i)[0].tolist()), "d", "s") for i in range(2)]
    with TransformersProbe(model, recorder) as probe:
        assert probe.heads == recorder.heads
        captured = run(probe, recorder, samples, AnalysisOptions(batch_size=2))
    results = summarised(captured, model={})
    found = {name: result.values for name, result in results.metrics.items()}
    assert found["importance"][:3] == [[None] * 4] * 3
    assert all(value is not None for value in found["importance"][3])
    assert results.metrics["imbalance"].number == found["imbalance"][3]
    gates = [probed(model, torch.tensor([s.tokens]))[0].layers[0, 3] for s in samples]
    gates = torch.cat([g["explicit_gate_HTX"].flatten() for g in gates])
    assert np.mean(found["gate_score"][3]) == pytest.approx(float(gates.mean()), rel=1e-5)
    assert results.metrics["gate_score"].number == pytest.approx(float(gates.mean()), rel=1e-5)
    assert found["gate_spread"][3] == pytest.approx(float(gates.std(correction=0)), rel=1e-4)
    assert found["gate_max"][3] == float(gates.max())
    assert sum(results.gate_histogram[3]) == len(gates)
    assert results.gate_histogram[3][99] == int((gates >= 0.99).sum())


def test_a_cpu_runs_a_batch_in_parts_that_change_nothing(model, samples, captured, monkeypatch):
    rows = []
    hook = model.register_forward_pre_hook(lambda _module, args: rows.append(tuple(args[0].shape)))
    monkeypatch.setattr(measure, "PASS_TOKENS", 11)
    try:
        cut = analyzed(model, samples, token_bytes=SIZES)
    finally:
        hook.remove()
    assert rows == [(1, 5), (1, 9), (1, 9), (1, 12), (1, 12)]  # a row longer than that runs, too
    assert [s.source for s in cut.samples] == [s.source for s in captured.samples]
    for name, value in captured.values.items():
        np.testing.assert_allclose(cut.values[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_model_that_takes_seconds_says_at_once_that_it_began(model, samples, monkeypatch, capsys):
    analyzed(model, samples)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(probe, "_SECONDS", 0)
    analyzed(model, samples)
    assert capsys.readouterr().err == f"analyzing: 0 of {len(samples)} samples\n"
    assert not probe.takes_seconds(torch.nn.Linear(9, 9, device="meta"))


def test_the_layers_of_a_batch_are_progress(model, samples, monkeypatch):
    told = []

    class Told(measure.Store):
        def fill(self, parts, make, **options):
            def noted(number, done):
                return make(number, lambda *now: told.append(now) or done(*now))

            return super().fill(parts, noted, **options)

    monkeypatch.setattr(measure, "Store", Told)
    analyzed(model, samples[:1])
    assert list(dict.fromkeys(told)) == [(0, 0.5), (0, 1.0), (1,)]


def test_all_statistics_are_asked_for(captured):
    assert Recorder([4]).needs == STATISTICS.keys() - GRADIENT.keys()
    assert Recorder([4], options=AnalysisOptions(metrics=("gradient",))).needs == set(STATISTICS)


def test_no_graph_outlives_its_pass(model, samples):
    """With a gradient of each text, alone and in a batch; and the weights stay as they were."""

    def with_graph():
        # By type(): isinstance asks a weak proxy of another test for what is gone.
        alive = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        return [tensor for tensor in alive if tensor.grad_fn is not None]

    others = with_graph()  # of tests before, in this process
    found = []
    for size in (2, 1):
        options = AnalysisOptions(batch_size=size, metrics=("gradient",))
        recorder = Recorder([4, 4], ["gradient", "awft"], options)
        with TransformersProbe(model, recorder) as probe:
            assert not any(weight.requires_grad for weight in model.parameters())
            found.append(run(probe, recorder, samples, options))
            assert not {id(tensor) for tensor in with_graph()} - {id(tensor) for tensor in others}
    assert all(weight.requires_grad for weight in model.parameters())
    for name in ("gradient", "awft"):
        one, other = (of.values[name] for of in found)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
