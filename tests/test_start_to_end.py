"""From text to a trained model, its export and the analyses of both, by the commands of a shell."""

import json

import pytest

from tests.forkserver import server
from tests.runs import SOURCES, metrics, steps
from tests.training.test_end_to_end import FLAGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """text: data; run: trained on two ranks; hf: its export; run-page and hf-page: analyses."""
    folder = tmp_path_factory.mktemp("start-to-end")
    text = folder / "text"
    layout = ["--tensor-model-parallel-size", "2", "--head-balance-coeff", "0.1"]
    source = ["--data-path", str(text), "--tokenizer-model", f"{text}-tokenizer"]
    samples = ["--data", SOURCES, "--seq-length", "32", "--max-samples", "4", "--device", "cpu"]

    def megasink(*argv, module="megasink"):
        done = server().run([module, *map(str, argv)], tree=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    drawn = ["--validation", "0.1", "--workers", "1"]
    megasink("data", SOURCES, "--output", text, "--train-tokenizer", "400", *drawn)
    said = megasink("train", "--run-dir", folder / "run", *FLAGS, *layout, *source)
    assert f"data: validation uses {text}-validation, not a share of --split" in said
    megasink("convert-to-hf", folder / "run", "--output", folder / "hf", "--device", "cpu")
    for name, module in (("run", "megasink"), ("hf", "tests.analysis.capture.without_figures")):
        page = ["--output", folder / f"{name}-page"]
        megasink("analyze", folder / name, *samples, *page, module=module)
    return folder


def test_the_model_learned(folder):
    losses = [line["lm_loss"] for line in steps(folder / "run")]
    assert len(losses) == 12
    # A step's few texts may be odd ones.
    valid = [line["valid_lm_loss"] for line in metrics(folder / "run") if "valid_lm_loss" in line]
    assert valid[-1] < losses[0] - 0.5


def test_the_exported_model_is_the_trained_one(folder):
    ours, theirs = (
        json.loads((folder / f"{name}-page" / "results.json").read_text())["metrics"]
        for name in ("run", "hf")
    )
    layers = zip(ours["importance"]["values"], theirs["importance"]["values"], strict=True)
    for layer, expected in layers:
        assert layer == pytest.approx(expected, abs=1e-5)
    loss = ours["nats_per_token"]["number"]
    assert loss == pytest.approx(theirs["nats_per_token"]["number"], rel=1e-5)
    assert (folder / "hf-page" / "report.html").is_file()


def test_the_same_from_python(folder):
    done = server().run(["tests.analysis.api.of_run", str(folder)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("<Analysis of run: 4 samples, ")
