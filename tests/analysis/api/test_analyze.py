"""`megasink.analyze` measures what the command measures, and its results draw themselves."""

import doctest
import importlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import megasink
from megasink.cli import main
from megasink.errors import ConfigError, UserError
from tests.analysis.capture.tiny_models import REAL_TEXTS, save_with_tokenizer, tiny_model

ROOT = Path(__file__).resolve().parents[3]
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """my-model: a model with sinks; texts.jsonl: documents of it."""
    root = tmp_path_factory.mktemp("api")
    texts = REAL_TEXTS[:4]
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    save_with_tokenizer(root, "granite-swa", texts).rename(root / "my-model")
    return root


@pytest.fixture(scope="module")
def hub(folder):
    return megasink.load_model(folder / "my-model")


@pytest.fixture(scope="module")
def found(folder, hub):
    return megasink.analyze(hub, folder / "texts.jsonl", seq_length=24, max_samples=3)


def numbers(results):
    return {name: (of.values, of.number) for name, of in results.metrics.items()}


def test_it_measures_what_the_command_measures(folder, found, monkeypatch):
    monkeypatch.setattr("megasink.analysis.pages.analysis_page.figures", lambda analyses, kinds: [])
    command = f"analyze {folder}/my-model --data {folder}/texts.jsonl --seq-length 24"
    command += f" --max-samples 3 --device cpu --output {folder}/page"
    assert main(command.split()) == 0
    read = megasink.read_analysis(folder / "page")
    assert numbers(read.results) == numbers(found.results)
    assert read.results.run.data_sha256 == found.results.run.data_sha256
    assert read.name == found.name == "my-model"
    assert {name: values.tolist() for name, values in read.by_sample.items()} == {
        name: values.tolist() for name, values in found.by_sample.items()
    }


def test_texts_are_strings_or_files(folder, hub, found):
    lines = (folder / "texts.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines][:3]
    again = megasink.analyze(hub.model, texts, tokenizer=hub.tokenizer, seq_length=24)
    assert numbers(again.results) == numbers(found.results)


def test_metrics_that_take_a_backward_pass_are_named(hub):
    text = ["Heads that rest attend to the first token."]
    assert "gradient" not in megasink.analyze(hub, text)
    found = megasink.analyze(hub, text, metrics=["gradient"])
    assert found.gradient.values.shape == (2, 4)
    assert np.isfinite(found.gradient.values).all()
    assert "gradient_signed" not in found
    for loss, name, message in (
        (True, "gradeint", r"did you mean gradient\?"),
        (False, "gradient", "loss"),
    ):
        with pytest.raises(UserError, match=message):
            megasink.analyze(hub, text, metrics=[name], loss=loss)


def test_metrics_are_attributes(found):
    assert found.importance.values.shape == (2, 4)
    assert np.array_equal(np.asarray(found.importance), found["importance"].values)
    assert found.summary["imbalance"] == found.imbalance.number
    assert "importance" in dir(found)
    assert list(found) == list(found.results.metrics)
    assert len(found) > 50
    assert str(found.importance).startswith("head importance (share): 0.")
    assert repr(found.importance).endswith("importance, 2 x 4>")
    assert repr(found) == f"<Analysis of my-model: 3 samples, {len(found)} metrics>"
    assert "<td>head imbalance</td>" in found._repr_html_()
    with pytest.raises(AttributeError, match="did you mean sink_rate"):
        _ = found.sinkrate
    with pytest.raises(KeyError, match="no metric 'gate'"):
        found["gate"]
    assert pickle.loads(pickle.dumps(found)).summary == found.summary


def test_what_can_be_drawn_is(found, tmp_path):
    assert found.importance.plot()._repr_png_().startswith(PNG)
    assert {"importance", "sinks", "norms", "scores"} <= set(found.figures)
    assert found.plot("gates") is None  # of explicit gates alone
    found.sink_rate_by_layer.plot().save(tmp_path / "sinks.pdf")
    assert (tmp_path / "sinks.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(ValueError, match="no figure shows perplexity"):
        found.perplexity.plot()
    with pytest.raises(ValueError, match="the figure 'sink' is unknown"):
        found.plot("sink")


def test_what_load_model_returned_can_be_changed(hub):
    ids = torch.arange(12)[None]
    before = hub.model(ids).logits
    with megasink.zero_heads(hub, [(0, 0)]):
        assert not torch.equal(hub.model(ids).logits, before)
    assert torch.equal(hub.model(ids).logits, before)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("one string", {}, "one string: give a list"),
        ([], {}, "no text has 2 tokens or more"),
        (
            ["a b c"],
            {"seq_length": 1, "bos": "always"},
            r"(?s)seq_length 1: use 2 or more.*bos 'alw",
        ),
        (["a b c"], {"seq_length": 10**6}, "--seq-length 1000000 is longer than the 64 positions"),
    ],
)
def test_bad_input_is_refused(hub, texts, options, message):
    with pytest.raises((UserError, ConfigError), match=message):
        megasink.analyze(hub, texts, **options)


WRONG = {
    "texts": lambda hub, _: megasink.analyze(hub, [None]),
    "text": lambda hub, _: megasink.analyze(hub, 5),
    "mixed texts": lambda hub, _: megasink.analyze(hub, ["a b c", Path("a")]),
    "seq_length": lambda hub, _: megasink.analyze(hub, ["a b c"], seq_length="24"),
    "batch_size": lambda hub, _: megasink.analyze(hub, ["a b c"], batch_size=1.5),
    "random_lengths": lambda hub, _: megasink.analyze(hub, ["a b c"], random_lengths=(3,)),
    "seed": lambda hub, _: megasink.analyze(hub, ["a b c"], seed=float("nan")),
    "metrics": lambda hub, _: megasink.analyze(hub, ["a b c"], metrics="gradient"),
    "output": lambda hub, _: megasink.analyze(hub, ["a b c"], output=5),
    "tokenizer": lambda hub, _: megasink.analyze(hub.model, ["a b c"], tokenizer="x"),
    "no model": lambda *_: megasink.analyze(5, ["a b c"]),
    "no folder": lambda *_: megasink.analyze("nothing", ["a b c"]),
    "load_model": lambda *_: megasink.load_model(None),
    "device": lambda hub, _: megasink.load_model("my-model", device="tpu"),
    "load_run": lambda *_: megasink.load_run("nothing"),
    "iteration": lambda *_: megasink.load_run("my-model", iteration="last"),
    "convert_to_hf": lambda *_: megasink.convert_to_hf("nothing", "out"),
    "read_analysis": lambda *_: megasink.read_analysis(5),
    "metric": lambda _, found: found["nothing"],
    "attribute": lambda _, found: found.nothing,
    "no name": lambda _, found: found[None],
    "figure": lambda _, found: found.plot(None),
    "values": lambda _, found: found.values("nothing"),
    "dataset": lambda _, found: found.values("importance", "nothing"),
    "picture": lambda _, found: found.importance.plot().save("/nothing/a.png"),
    "format": lambda _, found: found.importance.plot().save("a.nothing"),
    "head": lambda hub, _: megasink.zero_heads(hub, "9.0").__enter__(),
    "heads": lambda hub, _: megasink.zero_heads(hub, None).__enter__(),
    "a pair": lambda hub, _: megasink.steer_gates(hub, [(0, 0.5)], scale=0.5).__enter__(),
    "scale": lambda hub, _: megasink.steer_gates(hub, "0.0", scale=None).__enter__(),
    "threshold": lambda hub, _: megasink.drain_first_value(hub, threshold="x").__enter__(),
    "quantile": lambda hub, _: megasink.dynamic_zeroing(hub, score="awft", quantile=True),
    "score": lambda hub, _: megasink.dynamic_zeroing(hub, score=5, threshold=0.5).__enter__(),
    "calibration": lambda hub, _: megasink.dynamic_zeroing(
        hub, score="awft", quantile=0.5, calibration=[[10**9]]
    ).__enter__(),
    "interventions": lambda hub, _: megasink.intervening(hub, ["zero-heads"]).__enter__(),
    "balance": lambda hub, _: megasink.HeadBalanceLoss(hub),
    "coeff": lambda *_: megasink.HeadBalanceLoss(tiny_model("llama"), coeff="x"),
    "callback": lambda *_: megasink.HeadBalanceCallback(coeff="x"),
    "not a number": lambda *_: megasink.HeadBalanceLoss(tiny_model("llama"), coeff=float("nan")),
    "activations": lambda *_: megasink.activation_names(5),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_family_of_errors(name, hub, found, folder, monkeypatch):
    """For wrong input of any kind to any public call: one line, and nothing is written."""
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(megasink.UserError) as caught:
        WRONG[name](hub, found)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value)
    assert "\n" not in str(caught.value) or isinstance(caught.value, ConfigError)
    assert sorted(folder.rglob("*")) == before
    assert hub.model(torch.arange(12)[None]).logits.isfinite().all()


def test_a_model_that_does_not_fit_is_refused(hub, tmp_path):
    with pytest.raises(UserError, match="give the tokenizer too"):
        megasink.analyze(hub.model, ["a b c"])
    small = tiny_model("llama", vocab_size=8)
    with pytest.raises(UserError, match="but the model's vocabulary has 8 tokens"):
        megasink.analyze(small, ["what is this"], tokenizer=hub.tokenizer)
    with pytest.raises(ConfigError, match=r"in training mode: call model.eval\(\)"):
        megasink.analyze(tiny_model("llama").train(), ["a"], tokenizer=hub.tokenizer)
    with pytest.raises(UserError, match=r"no config\.json"):
        megasink.load_model(tmp_path)
    with pytest.raises(UserError, match="dtype 'int8': choose auto, float32, bfloat16"):
        megasink.load_model(tmp_path, dtype="int8")
    with pytest.raises(UserError, match="no finished checkpoint"):
        megasink.load_run(tmp_path)


@pytest.mark.parametrize("module", ["megasink.analysis.api"])
def test_the_examples_of_docstrings_run(module, hub):
    given = {"model": hub.model, "tokenizer": hub.tokenizer}
    done = doctest.testmod(importlib.import_module(module), extraglobs=given)
    assert done.attempted
    assert not done.failed


@pytest.mark.parametrize(
    "page", ["docs/python.md", "docs/coming-from-transformerlens.md", "README.md"]
)
def test_the_examples_of_the_pages_run(folder, page, tmp_path, monkeypatch, capsys):
    """As they are printed, in a folder where the models that they name are links to one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").symlink_to(folder / "texts.jsonl")
    for model in ("my-model", "MODEL", "runs/real-models/smollm2"):
        (tmp_path / model).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / model).symlink_to(folder / "my-model")
    names: dict[str, object] = {}
    ran = 0
    for example in (ROOT / page).read_text().split("```python\n")[1:]:
        block = example.split("```")[0]
        # tests/analysis/api/of_run.py runs the block of a run, tests/megatron those of Megatron.
        if "load_run" not in block and "megasink.megatron" not in block:
            exec(compile(block, page, "exec"), names)
            ran += 1
    assert ran == {"docs/python.md": 4}.get(page, 1)
    said = capsys.readouterr().out
    assert "sink rate, eps 0.3 (share): " in said
    if page == "README.md":
        assert "head imbalance: " in said
        assert (tmp_path / "importance.png").read_bytes().startswith(PNG)


def test_curves_of_norms_end_below_the_frame(found):
    axes = found.plot("values").figure.axes
    norms = [axis for axis in axes if axis.get_ylabel() == "L2 norm"]
    assert len(norms) == 3
    for axis in norms:
        highest = max(np.nanmax(curve.get_ydata()) for curve in axis.lines)
        assert axis.get_ylim() == (0, pytest.approx(1.05 * highest))
