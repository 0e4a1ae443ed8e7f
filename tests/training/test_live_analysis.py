"""--analyze-interval: training does not notice, and replicas find what one process finds."""

import csv
import json
import shutil

import numpy as np
import pytest

from megasink.analysis import draw as pages
from megasink.analysis.pages.metrics import read_metrics
from megasink.cli import main
from megasink.cli.demo_figure import draw_demo
from tests.runs import MOCK, TINY, UNTIED, metrics

FLAGS = [*TINY, *UNTIED, *MOCK]
FLAGS += """
    --seq-length 64 --max-position-embeddings 64 --train-iters 6 --lr 1e-2 --bf16
    --eval-interval 2 --log-interval 2 --head-balance-coeff 0.1 --softmax-offset-init 1
    --hidden-dropout 0.1 --attention-dropout 0.0 --log-sink-rate
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
""".split()
LIVE = ["--analyze-interval", "4", "--analyze-samples", "7"]


def lines(folder, wanted=lambda line: True):
    """metrics.jsonl without the times."""
    found = [line for line in metrics(folder) if wanted(line)]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in found]


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """Two runs of two replicas that differ in the analyses, and the last analysis by one rank."""
    root = tmp_path_factory.mktemp("live")

    def train(name, ranks, *flags):
        flags = [*FLAGS, "--run-dir", str(root / name), *flags]
        pool.train(flags, ranks)

    train("plain", 2)
    train("live", 2, *LIVE)
    shutil.copytree(root / "live", root / "alone")
    shutil.rmtree(root / "alone" / "analysis")
    train("alone", 1, *LIVE, "--resume")
    return root


def test_training_does_not_notice(runs):
    plain = lines(runs / "plain")
    live = lines(runs / "live", lambda line: "analysis_sink_rate" not in line)
    # Steps; evaluations at 2, 4 and 6, and of the test set.
    assert len(plain) == 6 + 3 + 1
    assert live == plain


def test_what_is_written(runs):
    found = lines(runs / "live", lambda line: "analysis_sink_rate" in line)
    assert [line["iteration"] for line in found] == [4, 6]  # the last step once
    folders = sorted((runs / "live" / "analysis").iterdir())
    assert [path.name for path in folders] == ["iter_0000004", "iter_0000006"]
    for line, folder in zip(found, folders, strict=True):
        assert {path.name for path in folder.iterdir()} == {
            *("results.json", "results.schema.json", "samples.npz"),
        }
        results = json.loads((folder / "results.json").read_text())
        assert results["samples"] == 7
        assert results["model"]["step"] == line["iteration"]
        assert results["model"]["trained_tokens"] == line["iteration"] * 4 * 64
        for name, result in results["metrics"].items():
            if f"analysis_{name}" in line:
                assert result["number"] == line[f"analysis_{name}"]
        assert results["metrics"]["imbalance"]["number"] == line["analysis_imbalance"] > 0
    first, last = (np.load(folder / "samples.npz") for folder in folders)
    assert not np.array_equal(first["metric/importance"], last["metric/importance"])


def test_the_demo_draws_two_such_runs(runs, tmp_path):
    pair = {name: read_metrics(runs / name) for name in ("live", "alone")}
    assert draw_demo(pair, tmp_path / "demo.png").stat().st_size > 20_000


def test_one_process_finds_the_same(runs):
    results, arrays = zip(
        *(
            (json.loads((folder / "results.json").read_text()), np.load(folder / "samples.npz"))
            for name in ("live", "alone")
            for folder in [runs / name / "analysis" / "iter_0000006"]
        ),
        strict=True,
    )
    assert results[0] == results[1]
    for name in arrays[0].files:
        assert arrays[0][name].tobytes() == arrays[1][name].tobytes(), name


def test_trace_and_report_read_them(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pages, "figures", lambda analyses, kinds: [])
    assert main(["trace", str(runs / "live"), "--output", str(tmp_path / "trace")]) == 0
    with (tmp_path / "trace" / "trace.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["tokens"]) for row in rows] == [("4", "1024"), ("6", "1536")]
    assert (tmp_path / "trace" / "trace.png").stat().st_size > 10_000
    found = lines(runs / "live", lambda line: "analysis_sink_rate" in line)
    assert [float(row["imbalance"]) for row in rows] == [f["analysis_imbalance"] for f in found]
    folders = [str(path) for path in (runs / "live" / "analysis").iterdir()]
    assert main(["report", *folders, "--output", str(tmp_path / "both")]) == 0
    assert "step 6" in (tmp_path / "both" / "report.html").read_text()
    assert main(["trace", str(runs / "plain"), "--output", str(tmp_path / "none")]) == 2
    assert "no --data" in capsys.readouterr().err
