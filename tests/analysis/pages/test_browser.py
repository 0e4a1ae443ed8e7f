"""The pages in a real browser: whole, readable on a wide and on a narrow screen, and silent."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from markupsafe import Markup

from megasink.analysis.analysis_folder import analysis_of, read_analysis
from megasink.analysis.analysis_summary import summarize
from megasink.analysis.capture.attention_maps import Head, geometry
from megasink.analysis.capture.input_samples import Sample
from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.analysis.checkpoint_trace import write_trace
from megasink.analysis.measure import Recorder, run
from megasink.analysis.metrics import metrics_shown
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.pages import analysis_figures, html
from megasink.analysis.pages import analysis_page as pages
from megasink.analysis.pages.analysis_page import write_numbers
from megasink.analysis.result_schemas import RunFacts
from megasink.cli import main
from tests.analysis.capture.tiny_models import save_with_tokenizer, tiny_model
from tests.analysis.pages.browser import CHROMIUM, console_of, seen

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs MEGASINK_TEST_CHROMIUM")

NAME = (
    "<script>alert('x')</script><img src=//example.org/x.png> a-name-without-any-space-" + 40 * "y"
)

WIDTHS = (1280, 400)
RUN = RunFacts(seed=1, data_sha256="")
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of two models: one with a hostile name, maps and points, one without attention in
    most layers."""
    root = tmp_path_factory.mktemp("report")
    generator = torch.Generator().manual_seed(0)
    samples = [
        Sample(tuple(torch.randint(3, 64, (12,), generator=generator).tolist()), data, f"s{i}")
        for i, data in enumerate(("a", "a", "<b>"))
    ]
    for name, model in (("gpt-oss", NAME), ("qwen3.5", "qwen")):
        _analyzed(root / name, tiny_model(name), model, samples)
    position = np.tile(np.arange(6), 3)
    points = np.random.default_rng(0).normal(size=(18, 2))
    np.savez(
        root / "gpt-oss" / "geometry.npz",
        mlp0_tsne_N2=points,
        normed_pca_N2=points,
        position_N=position,
        sample_N=np.repeat(np.arange(3), 6),
    )
    names = ("sinks", "importance", "gates", "norms", "layer_maps", "head", "states")
    with pytest.MonkeyPatch.context() as patch:
        some = [d for d in analysis_figures.drawings() if d.name in names]
        patch.setattr(analysis_figures, "drawings", lambda: some)
        pages.write_report([read_analysis(root / name) for name in ("gpt-oss", "qwen3.5")], root)
    return root / "report.html"


def _analyzed(folder: Path, model, name, samples):
    heads = [0, 0, 0, 4] if name == "qwen" else [4, 4]
    recorder = Recorder(heads, options=AnalysisOptions(positions=12))
    with TransformersProbe(model, recorder) as probe:
        captured = run(probe, recorder, samples, AnalysisOptions(batch_size=3))
    maps = None
    if name != "qwen":
        maps = geometry(
            partial(TransformersProbe, model),
            samples,
            heads,
            [Head(1, 2, "<i>asked</i>")],
            length=12,
            batch_size=3,
            device="cpu",
            text_of=lambda token: ("<b>", "$x_{", "\n", "日本")[token % 4],
        )
    values = captured.analysis_values(RUN.seed)
    results = summarize(captured, values, model={"name": name}, run=RUN, inputs=samples)
    arrays = captured.arrays(RUN.seed)
    write_numbers(folder, analysis_of(results, arrays, maps or {}, {}), arrays)


def test_the_report_is_whole(report, tmp_path):
    found = seen(report, WIDTHS, tmp_path)
    assert sorted(found.measured) == sorted(WIDTHS)
    for width, page in found.measured.items():
        assert page["scroll"] == width  # nothing hangs over the right edge
        assert page["images"] == len(list((report.parent / "figures").glob("*.png"))) == 7
        assert page["blank"] == []
        assert page["unnamed"] == page["outside"] == page["askew"] == 0
        assert page["titled"] > 100
        assert page["tables"] >= 5
        assert page["least"] > 500  # as wide as can be read, on a narrow screen too
        assert page["scripts"] == 0
        assert page["fetched"] == []
        assert {"Summary", "Sinks", "Heads", "Hidden states", "Geometry"} <= set(page["headings"])
        assert page["headings"][0] == f"{NAME}, qwen"
    assert found.console == []


def test_the_report_obeys_its_own_policy(report, tmp_path):
    assert console_of(report, tmp_path) == []


def test_a_trace(tmp_path):
    numbers = dict.fromkeys(metrics_shown("scalar"), 0.3) | {"circuit_stage": "forming"}
    later = numbers | {"circuit_stage": "fixed", "bits_per_byte": None}
    rows = [{"step": n, "tokens": 100 * n, **of} for n, of in ((100, numbers), (200, later))]
    write_trace(rows, tmp_path, NAME)
    found = seen(tmp_path / "report.html", WIDTHS, tmp_path)
    assert sorted(found.measured) == sorted(WIDTHS)
    for width, page in found.measured.items():
        assert page["scroll"] == width
        assert (page["images"], page["blank"], page["outside"]) == (1, [], 0)
        assert page["fetched"] == []
        assert page["headings"][0] == f"{NAME}: training trace"
    assert found.console == []


def of_commands(root):
    """The pages of commands that measure little: {name: page}."""
    texts = [f"Text {i}: nothing stands twice, {'again ' * i}and it ends." for i in range(5)]
    save_with_tokenizer(root, "llama", texts, 330)
    text = root / "text.txt"
    text.write_text("\n".join(texts))
    for name, flags in (
        ("sweep", "--lengths 4 8 --bos none"),
        ("ablate", "--heads 0.1 1.2"),
    ):
        line = f"{name} {root}/llama --data {text} --device cpu --output {root}/{name} {flags}"
        assert main(line.split()) == 0
    for name in ("a", "b"):
        (root / name).mkdir()
        steps = [{"iteration": n, "lm_loss": 2.0 + 1 / n, "imbalance": 0.1} for n in range(1, 30)]
        (root / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    assert main(f"compare {root}/a {root}/b --output {root}/both.png".split()) == 0
    return {n: root / n / "report.html" for n in ("sweep", "ablate")} | {
        "compare": root / "both.html"
    }


def test_the_pages_of_other_commands_are_of_the_same_make(tmp_path):
    for name, page in of_commands(tmp_path).items():
        (tmp_path / f"seen-{name}").mkdir()
        found = seen(page, WIDTHS, tmp_path / f"seen-{name}")
        assert found.console == []
        for width, one in found.measured.items():
            assert one["scroll"] == width
            assert (one["blank"], one["fetched"], one["scripts"]) == ([], [], 0)
            assert one["unnamed"] == one["outside"] == one["askew"] == 0
            assert one["titled"] >= 1
            assert one["tables"] >= one["images"] >= 1


def test_what_is_wrong_with_a_page_is_seen(tmp_path):
    page = tmp_path / "wrong.html"
    page.write_text(
        "<!doctype html><html><head><link rel='icon' href='data:,'></head><body>"
        "<h1>wrong</h1><img src='http://example.org/x.png'>"
        f"<img alt='wide' width='900' src='data:image/png;base64,{PIXEL}'>"
        "<table><td>" + 80 * "wide" + "</td></table><script>null.x</script></body></html>"
    )
    found = seen(page, [400], tmp_path)
    page = found.measured[400]
    assert page["scroll"] > 900
    assert (page["images"], page["blank"], page["unnamed"], page["outside"]) == (2, [""], 1, 1)
    assert page["scripts"] == 1
    assert page["fetched"] == ["http://example.org/x.png"]
    assert any("null" in line for line in found.console)


def test_the_policy_of_a_page_lets_nothing_in(tmp_path):
    page = tmp_path / "page.html"
    made = html.Page("a page", "A page")
    made.section("One", Markup("<img src='http://example.org/x.png'><script>alert(1)</script>"))
    page.write_text(made.text())
    said = console_of(page, tmp_path)
    for what in ("image 'http://example.org/x.png'", "inline script"):
        assert any("Content Security Policy" in line and what in line for line in said), said
