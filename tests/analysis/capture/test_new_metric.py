"""A metric of one's own, as CONTRIBUTING.md shows it: one function, and it is everywhere."""

import base64
import csv
import importlib
import json
import re

import numpy as np
import pytest

from megasink.analysis.analysis_folder import read_analysis
from megasink.analysis.checkpoint_trace import trace_row, write_trace
from megasink.analysis.metrics import metrics, metrics_shown, registry
from megasink.analysis.pages import analysis_figures
from megasink.analysis.pages import analysis_page as pages
from megasink.analysis.result_schemas import scalars_of
from megasink.cli import main
from tests.analysis.capture.tiny_models import save_with_tokenizer
from tests.documented import MODULES

NAME, TITLE = "importance_gini", "importance gini"
TEXTS = [
    f"Text {i}: heads that are all alike have a coefficient of 0, {'and ' * i}." for i in (1, 4)
]


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    """A module of one's own with the metric of CONTRIBUTING.md, which has no row of a paper."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_metrics.py").write_text(MODULES["my_metric.py"])
    metrics()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
        patch.syspath_prepend(folder)
        importlib.import_module("my_metrics")
        yield metrics()[NAME]


@pytest.fixture(scope="module")
def analyzed(registered, tmp_path_factory):
    """Two models, with the figures that are made from the registry alone."""
    root = tmp_path_factory.mktemp("gini")
    with pytest.MonkeyPatch.context() as patch:
        wanted = ("metrics", "importance")
        some = [d for d in analysis_figures.drawings() if d.name in wanted]
        patch.setattr(analysis_figures, "drawings", lambda: some)
        for name in ("llama", "qwen3"):
            folder = save_with_tokenizer(root / f"{name}-files", name, TEXTS, 330)
            (root / "texts.jsonl").write_text(
                "".join(json.dumps({"text": t}) + "\n" for t in TEXTS)
            )
            command = f"analyze {folder} --data {root}/texts.jsonl --output {root}/out/{name}"
            assert main([*command.split(), "--seq-length", "16", "--device", "cpu"]) == 0
        both = f"report {root}/out/llama {root}/out/qwen3 --output {root}/out/both"
        assert main(both.split()) == 0
    return root / "out"


def gini(row):
    """By the area under the Lorenz curve."""
    ordered = np.sort(row)
    ranks = np.arange(1, len(row) + 1)
    return (2 * ranks - len(row) - 1) @ ordered / (len(row) * ordered.sum())


def test_results_and_tables_have_it(analyzed):
    found = json.loads((analyzed / "llama" / "results.json").read_text())["metrics"]
    expected = [gini(row) for row in found["importance"]["values"]]
    np.testing.assert_allclose(found[NAME]["values"], expected)
    assert found[NAME]["number"] == pytest.approx(np.mean(expected))
    with (analyzed / "llama" / "tables" / "layers.csv").open() as file:
        cells = [float(row[NAME]) for row in csv.DictReader(file)]
    assert cells == found[NAME]["values"]
    with (analyzed / "llama" / "tables" / "datasets.csv").open() as file:
        assert float(next(csv.DictReader(file))[NAME]) == pytest.approx(found[NAME]["number"])


def test_page_figures_and_comparison_have_it(analyzed):
    numbers = []
    for name in ("llama", "qwen3", "both"):
        page = (analyzed / name / "report.html").read_text()
        pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
        curve = (analyzed / name / "figures" / "metrics.png").read_bytes()
        assert curve in {base64.b64decode(picture) for picture in pictures}
        (row,) = re.findall(rf'<tr><th scope="row">{TITLE}, mean<br>.*?</th>(.*?)</tr>', page)[:1]
        numbers.append(re.findall("<td>([^<]+)</td>", row))
    assert numbers[2][:2] == numbers[0] + numbers[1]
    assert float(numbers[2][2]) == pytest.approx(
        float(numbers[1][0]) - float(numbers[0][0]), abs=1.1e-3
    )  # the change, of numbers that are not rounded
    assert numbers[0] != numbers[1]


def test_a_trace_has_it(analyzed, tmp_path):
    results = []
    for step, name in enumerate(("llama", "qwen3"), 1):
        of = read_analysis(analyzed / name).results
        of.model.step, of.model.trained_tokens = step, 1000 * step
        results.append(of)
    write_trace([trace_row(of) for of in results], tmp_path, "a run")
    with (tmp_path / "trace.csv").open() as file:
        cells = [float(row[NAME]) for row in csv.DictReader(file)]
    expected = [of.metrics[NAME].number for of in results]
    assert cells == expected
    assert f'<th scope="col">{TITLE}</th>' in (tmp_path / "report.html").read_text()
    shown = metrics_shown("scalar")
    assert NAME in shown
    assert set(scalars_of(results[0])) == set(shown)


def test_trace_png_has_a_panel_for_it(analyzed, monkeypatch):
    from megasink.analysis import checkpoint_trace

    of = read_analysis(analyzed / "llama").results
    of.model.step, of.model.trained_tokens = 1, 1000
    row = trace_row(of)
    known = {n: e for n, e in metrics_shown("scalar").items() if row[n] is not None}
    axes = checkpoint_trace._draw([row], known).axes
    titles = {axis.get_title(loc="left") or axis.get_title() for axis in axes}
    assert {metrics()[name].title for name, n in scalars_of(of).items() if n is not None} <= titles
    assert TITLE in titles


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 2}, "has format 2, but this version reads 3: analyze the model again"),
        ({"samples": "two"}, "results.json: samples is 'two'"),
        ({"metrics": {NAME: {"values": []}}}, f"results.json: it has no metrics.{NAME}.number"),
        ({"colour": "red"}, "results.json: it has the unknown key colour"),
        ({"non_finite": [3]}, "results.json: non_finite.0 is 3"),
    ],
)
def test_results_of_another_kind_are_refused(analyzed, tmp_path, capsys, change, problem):
    for file in ("results.json", "samples.npz"):
        (tmp_path / file).write_bytes((analyzed / "llama" / file).read_bytes())
    found = json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps(found | change))
    assert main(f"report {tmp_path} --output {tmp_path}/out".split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


def test_a_metric_that_is_not_registered_is_named(analyzed, tmp_path, capsys, monkeypatch):
    """An analysis that knew more metrics than whoever reports on it."""
    rest = {name: entry for name, entry in registry._REGISTRY.items() if name != NAME}
    monkeypatch.setattr(registry, "_REGISTRY", rest)
    monkeypatch.setattr(pages, "figures", lambda analyses, kinds: [])
    assert main(f"report {analyzed}/llama --output {tmp_path}".split()) == 0
    assert f"llama has metrics that are not registered here: {NAME}" in capsys.readouterr().err
