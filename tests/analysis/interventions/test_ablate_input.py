"""`megasink ablate`: thresholds of an analysis, and what is refused."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megasink.analysis.pages import analysis_page as pages
from megasink.cli import main
from tests.analysis.capture.tiny_models import tiny_model
from tests.analysis.interventions.ablating import (
    LENGTH,
    command,
    results_of,
)


@pytest.fixture(scope="module")
def analysis(folder):
    """An analysis of the model on the same texts."""
    texts = f"{folder}/first.jsonl {folder}/second.jsonl"
    flags = f"--seq-length {LENGTH} --output {folder}/analysis --device cpu --metrics gradient"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "figures", lambda analyses, kinds: [])
        assert main(f"analyze {folder}/llama --data {texts} {flags}".split()) == 0
    return folder / "analysis"


@pytest.mark.parametrize("score", ["ahon_ln", "gradient"])
@pytest.mark.usefixtures("undrawn")
def test_a_calibration_sets_the_same_thresholds(folder, analysis, tmp_path, forwards, score):
    assert main(command(folder, tmp_path / "own", "--score", score, "--zeroed", "0", "10")) == 0
    forwards.clear()
    flags = ("--score", score, "--calibration", str(analysis), "--max-samples", "1")
    assert main(command(folder, tmp_path / "given", *flags, "--zeroed", "0", "10")) == 0
    found = results_of(tmp_path / "given")
    assert found.thresholds == results_of(tmp_path / "own").thresholds
    assert found.calibration == str(analysis)
    assert len(forwards) == len({point.key for point in found.points})


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        ("--score awft --seeds 1 1", ["--seeds 1 1: pass each value once"]),
        ("--heads 0.1 --layer -1", ["numbered from 0"]),
        ("--score random", ["--score random is always measured"]),
        ("--by gradient --tasks a", ["--by gradient needs the loss of texts"]),
        ("--heads 0.1 --calibration .", ["--calibration needs --score"]),
        (
            "--heads 0.1 --zeroed 10 --seeds 1",
            ["--zeroed applies only to --score", "--seeds applies only to --score"],
        ),
    ],
)
def test_bad_input_is_named(folder, tmp_path, capsys, flags, problems):
    base = f"ablate {folder}/llama --data {folder}/first.jsonl --output {tmp_path}/out --device cpu"
    assert main(f"{base} {flags}".split()) == 2
    said = capsys.readouterr().err
    for problem in problems:
        assert problem in said
    assert not list(tmp_path.rglob("*.json"))


def test_a_calibration_of_another_model(folder, analysis, tmp_path, capsys):
    other = tmp_path / "other"
    model = tiny_model("llama", vocab_size=330)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(other)
    flags = f"--tokenizer {folder}/llama --data {folder}/first.jsonl --output {tmp_path}/out"
    flags += f" --calibration {analysis} --score awft --device cpu"
    assert main(f"ablate {other} {flags}".split()) == 2
    assert (
        f"--calibration {analysis} is the analysis of other weights (LlamaForCausalLM: "
        in capsys.readouterr().err
    )
    assert not list((tmp_path / "out").rglob("*.json"))


def test_a_model_whose_own_loss_is_nan_is_refused(folder, tmp_path, capsys):
    shutil.copytree(folder / "llama", tmp_path / "nan")
    path = tmp_path / "nan" / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.self_attn.v_proj.weight"][3] = torch.nan
    save_file(weights, path, {"format": "pt"})
    flags = f"--data {folder}/first.jsonl --output {tmp_path}/out --device cpu --heads 0.1"
    assert main(["ablate", str(tmp_path / "nan"), *flags.split()]) == 2
    assert "gives infinite or NaN nats per token: its weights" in capsys.readouterr().err
    assert not (tmp_path / "out" / "ablation.json").exists()
