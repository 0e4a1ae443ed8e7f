"""Thresholds from an analysis, and the t-SNE under ablation."""

from functools import partial

import numpy as np
import pytest
import torch

from megasink import dynamic_zeroing
from megasink.analysis.ablate.settings import measure_scores, read_calibration
from megasink.analysis.analysis_folder import analysis_of
from megasink.analysis.analysis_summary import summarize
from megasink.analysis.capture.input_samples import Sample
from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.analysis.measure import Recorder, run
from megasink.analysis.metrics.inactive_heads import threshold
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.pages.analysis_page import write_numbers
from megasink.analysis.result_schemas import RunFacts
from megasink.errors import UserError
from megasink.transformers.model_identity import weights_hash
from tests.analysis.capture.tiny_models import VOCABULARY, tiny_model

SCORES = ("awft", "ahon_ln", "lthon_hn")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def samples():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCABULARY, (6, 9), generator=generator)
    return [Sample(tuple(row.tolist()), "d", f"s{i}") for i, row in enumerate(ids)]


def opener(model):
    return partial(TransformersProbe, model)


@pytest.fixture(scope="module")
def folder(model, samples, tmp_path_factory):
    recorder = Recorder([4, 4], ["awft", "ahon", "lthon"])
    with opener(model)(recorder) as probe:
        measured = run(probe, recorder, samples, AnalysisOptions(batch_size=3, loss=False))
    output = tmp_path_factory.mktemp("analysis")
    facts = {"kind": "LlamaForCausalLM", "name": "tiny"}
    options = RunFacts(seed=0, weights=weights_hash(model), data_sha256="")
    results = summarize(measured, measured.analysis_values(0), model=facts, run=options)
    arrays = measured.arrays(0)
    write_numbers(output, analysis_of(results, arrays, {}, {}), arrays)
    return output


def test_an_analysis_sets_thresholds(model, samples, folder):
    calibration = read_calibration(folder, weights_hash(model), [4, 4])
    for score in SCORES:
        here = measure_scores(opener(model), score, [sample.tokens for sample in samples])
        np.testing.assert_allclose(here, calibration[score], rtol=1e-5)
        side = "above" if score == "awft" else "below"
        tau = threshold(calibration[score], 0.25, side)
        ids = torch.tensor([sample.tokens for sample in samples])
        with (
            torch.no_grad(),
            dynamic_zeroing(model, score=score, quantile=0.25, calibration=folder) as zeroed,
        ):
            model(ids, use_cache=False)
        assert zeroed.threshold == tau
        assert 0 < zeroed.share < 0.6
    with dynamic_zeroing(model, score="random", quantile=0.25, calibration=folder) as zeroed:
        assert zeroed.threshold == 0.25


def test_calibrations_of_another_model_are_refused(model, folder, tmp_path):
    other = tiny_model("llama")
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1.0
    with pytest.raises(UserError, match="is the analysis of other weights"):
        read_calibration(folder, weights_hash(other), [4, 4])
    with pytest.raises(UserError, match="is the analysis of another model"):
        read_calibration(folder, weights_hash(model), [4, 4, 4])
    with pytest.raises(UserError, match="is the analysis of other weights"):
        dynamic_zeroing(other, score="awft", quantile=0.1, calibration=folder).__enter__()
    for score, share, problem in (("aeqd", 0.1, "has no aeqd"), ("awft", 1.1, "share of heads")):
        with pytest.raises(UserError, match=problem):
            dynamic_zeroing(model, score=score, quantile=share, calibration=folder).__enter__()
    with pytest.raises(UserError, match="does not hold an analysis"):
        read_calibration(tmp_path)
    for name in ("results.json", "samples.npz"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    text = (tmp_path / "results.json").read_text()
    (tmp_path / "results.json").write_text(text.replace(weights_hash(model), "null", 1))
    told = (tmp_path / "results.json").read_text().replace('"null"', "null")
    (tmp_path / "results.json").write_text(told)
    with pytest.raises(UserError, match="does not record the weights"):
        read_calibration(tmp_path)
