"""`megasink.analyze` measures what the command measures, and its results draw themselves."""

import doctest
import importlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import megasink
from megasink.cli import main
from megasink.errors import ConfigError, UserError
from tests.analysis.capture.tiny_models import save_with_tokenizer, tiny_model

ROOT = Path(__file__).resolve().parents[3]
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """my-model: a model with sinks; texts.jsonl: documents of it."""
    root = tmp_path_factory.mktemp("api")
    texts = (ROOT / "README.md").read_text().split("\n## ")[:4]
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
    monkeypatch.setattr("megasink.analysis.draw.figures", lambda analyses, kinds: [])
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
        (["a b c"], {"seq_length": 1, "bos": "always"}, r"(?s)seq_length 1: at least 2.*bos 'alw"),
        (["a b c"], {"seq_length": 10**6}, "--seq-length 1000000 is longer than the 64 positions"),
    ],
)
def test_bad_input_is_refused(hub, texts, options, message):
    with pytest.raises((UserError, ConfigError), match=message):
        megasink.analyze(hub, texts, **options)


def test_a_model_that_does_not_fit_is_refused(hub, tmp_path):
    with pytest.raises(UserError, match="give the tokenizer too"):
        megasink.analyze(hub.model, ["a b c"])
    small = tiny_model("llama", vocab_size=8)
    with pytest.raises(UserError, match="but the model has 8 tokens"):
        megasink.analyze(small, ["what is this"], tokenizer=hub.tokenizer)
    with pytest.raises(ConfigError, match=r"in training mode: call model.eval\(\)"):
        megasink.analyze(tiny_model("llama").train(), ["a"], tokenizer=hub.tokenizer)
    with pytest.raises(UserError, match=r"no config\.json"):
        megasink.load_model(tmp_path)
    with pytest.raises(UserError, match="dtype 'int8': choose auto, float32, bfloat16"):
        megasink.load_model(tmp_path, dtype="int8")
    with pytest.raises(UserError, match="no finished checkpoint"):
        megasink.load_run(tmp_path)


@pytest.mark.parametrize("module", ["megasink.analysis.api.analyze"])
def test_the_examples_of_docstrings_run(module, hub):
    given = {"model": hub.model, "tokenizer": hub.tokenizer}
    done = doctest.testmod(importlib.import_module(module), extraglobs=given)
    assert done.attempted
    assert not done.failed


def test_the_examples_of_the_page_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    page = (ROOT / "docs/python.md").read_text()
    examples = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    names: dict[str, object] = {}
    for example in examples:
        if "load_run" not in example:  # tests/test_start_to_end.py has a run
            exec(compile(example, "docs/python.md", "exec"), names)
    assert len(examples) >= 3
    assert isinstance(AutoTokenizer.from_pretrained(folder / "my-model").vocab_size, int)


def test_curves_of_norms_end_below_the_frame(found):
    axes = found.plot("values").figure.axes
    norms = [axis for axis in axes if axis.get_ylabel() == "L2 norm"]
    assert len(norms) == 3
    for axis in norms:
        highest = max(np.nanmax(curve.get_ydata()) for curve in axis.lines)
        assert axis.get_ylim() == (0, pytest.approx(1.05 * highest))
