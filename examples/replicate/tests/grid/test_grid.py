"""Grids of tiny runs: forked, interrupted, resumed, extended, with runs that fail or diverge."""

import contextlib
import csv
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from examples.replicate.grid import start
from examples.replicate.grid.command import main
from examples.replicate.grid.results import read_record, read_results
from examples.replicate.grid.start import Launched, Way, cpu_seconds
from examples.replicate.grid.table import text_of
from examples.replicate.languages import write_triggers
from examples.replicate.tests.grid import held
from examples.replicate.tests.grid.files import LETTERS, POINTS, STEPS, write
from megasink.errors import UserError
from tests.runs import metrics, resumed_from, steps
from tests.waiting import until

DATA = "{out}/data/letters-sample.jsonl"
RUNS = ("vanilla/seed-1", "sink/seed-1", "vanilla/seed-2", "sink/seed-2")


def records(out):
    return sorted(str(path.relative_to(out).with_suffix("")) for path in out.glob("*/seed-?.json"))


def begun(run):
    """Whether a run has done a few steps, and waits in the midst of its training (held.py)."""
    path = run / "metrics.jsonl"
    return path.is_file() and path.read_text().count("\n") >= 3


def interrupt(out, told, ended):
    """SIGTERM to this process, once a run is in the midst of its training."""
    while not ended.is_set():
        if any(begun(out / name) for name in RUNS):
            told.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(0.01)


def grid(file, out, *flags):
    try:
        return main([str(file), "--output", str(out), *flags])
    except UserError as error:
        print(error, file=sys.stderr)
        return getattr(error, "exit_code", 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A grid that was interrupted, finished, repeated, and extended."""
    root = tmp_path_factory.mktemp("grid")
    out, told, ended = root / "out", [], threading.Event()
    write_triggers(out / "data", "letters", documents=400, length=30)
    found = SimpleNamespace(out=out, codes=[])
    before = psutil.Process().children(recursive=True)  # workers of other tests
    sender = threading.Thread(target=interrupt, args=(out, told, ended))
    sender.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(start, "become", held.become)
            found.codes.append(grid(write(root / "a.toml", data=LETTERS), out, "--jobs", "2"))
    finally:
        ended.set()
        sender.join()
    assert told
    found.finished_before = records(out)
    found.left = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process not in before and process.status() != psutil.STATUS_ZOMBIE:
                found.left.append((" ".join(process.cmdline()), process.children()))
    times = {name: (out / f"{name}.json").stat().st_mtime_ns for name in found.finished_before}
    found.codes.append(grid(write(root / "a.toml", data=LETTERS), out, "--jobs", "2"))
    found.touched = [n for n, t in times.items() if (out / f"{n}.json").stat().st_mtime_ns != t]
    found.results = read_results(out)
    found.table = (out / "table.md").read_text()
    points = (
        'diverges = {attention-variant = "sink", lr = 1e30}\n'
        'fails = {attention-variant = "sink", attention-kernel = "cudnn"}\n'
    )
    found.codes.append(
        grid(write(root / "b.toml", points=POINTS + points, data=LETTERS), out, "--jobs", "2")
    )
    found.extended = read_results(out)
    return found


def test_a_signal_stops_the_runs_and_leaves_nothing_running(made):
    assert made.codes[0] == 128 + signal.SIGTERM
    assert len(made.finished_before) < 4
    # The fork server and multiprocessing's resource tracker stay, for the next grid.
    assert not [line for line, children in made.left if "become" in line or children]


def test_the_same_command_goes_on(made):
    assert made.codes[1] == 0
    assert made.touched == []
    assert records(made.out)[-4:] == sorted(RUNS)
    starts = {name: resumed_from(made.out / name) for name in RUNS}
    went_on = [steps for steps in starts.values() if len(steps) > 1]
    assert went_on, starts
    # At least one had saved what it had done.
    assert any(isinstance(again[-1], int) and again[-1] >= 3 for again in went_on), starts
    for name in RUNS:
        assert [line["iteration"] for line in steps(made.out / name)] == list(range(1, STEPS + 1))
        assert not (made.out / f"{name}.partial.json").exists()


def test_a_forked_run_has_the_losses_of_a_launched_one(made, tmp_path):
    uninterrupted = [name for name in RUNS if len(resumed_from(made.out / name)) == 1]
    run = made.out / uninterrupted[0]
    words = json.loads((run / "starts.jsonl").read_text().splitlines()[0])["command"][1:]
    words = words[: words.index("--resume")]
    words[words.index("--run-dir") + 1] = str(tmp_path / "run")
    started = Way("launch", "it is compared").train(words, 1, tmp_path / "logs", 1)
    until(lambda: started.poll() is not None)
    assert started.poll() == 0, (tmp_path / "logs" / "stderr.log").read_text()
    assert [line["lm_loss"] for line in steps(tmp_path / "run")] == [
        line["lm_loss"] for line in steps(run)
    ]


def test_the_record_of_a_run(made):
    record = read_record(made.out / "sink" / "seed-2.json")
    run = made.out / "sink" / "seed-2"
    assert (record.cell, record.points, record.seed) == ("sink", {"attention": "sink"}, 2)
    assert record.flags["attention-variant"] == "sink"
    assert record.measure["trace"][:5] == ["analyze", "{run}", "--checkpoints", "--data", DATA]
    last = {key: value for line in metrics(run) for key, value in line.items()}
    assert record.metrics["valid_lm_loss"] == last["valid_lm_loss"]
    with (run / "trace" / "trace.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert record.metrics["trace/sink_rate"] == float(rows[-1]["sink_rate"])
    assert record.curves["trace/sink_rate"][0] == [40.0]
    assert record.curves["valid_lm_loss"][0] == [20.0, 40.0]
    assert len(record.curves["lm_loss"][0]) == STEPS
    assert (record.start, record.threads) == ("fork", 1)
    assert record.cpu_seconds > 0


def test_the_table_and_the_figures(made):
    cell = made.results.cells["sink"]
    values = [read_record(made.out / "sink" / f"seed-{s}.json").metrics for s in (1, 2)]
    losses = [of["valid_lm_loss"] for of in values]
    assert cell.metrics["valid_lm_loss"].mean == pytest.approx(sum(losses) / 2)
    assert losses[0] != losses[1]
    rows = made.table.splitlines()
    assert rows[0] == "# Tiny | runs"
    assert [row.split(" | ")[0] for row in rows[4:6]] == ["| vanilla", "| sink"]
    assert rows[5].startswith(f"| sink | {text_of(cell.metrics['valid_lm_loss'])} | ")
    assert (made.out / "grid.png").stat().st_size > 10_000
    assert (made.out / "curves.png").stat().st_size > 10_000


def test_a_run_that_fails_is_told_and_the_others_go_on(made):
    assert made.codes[2] == 2
    fails = made.extended.cells["fails"]
    assert fails.runs == {}
    assert set(fails.missing) == {"1", "2"}
    assert "cudnn" in fails.missing["1"]
    assert len(made.extended.cells["sink"].runs) == 2


def test_a_run_that_diverges_is_a_result(made):
    cell = made.extended.cells["diverges"]
    assert cell.diverged == [1, 2]
    assert set(cell.runs["1"].metrics) == {"steps", "spikes", "diverged"}
    assert "2 of 2 diverged" in (made.out / "table.md").read_text()


def test_results_of_other_flags_are_refused_by_name(made, tmp_path, capsys):
    path = made.out / "sink" / "seed-1.json"
    text = path.read_text()
    path.write_text(text.replace('"lr": 0.001', '"lr": 0.002'))
    try:
        assert grid(write(tmp_path / "a.toml", points=POINTS, data=LETTERS), made.out) == 2
    finally:
        path.write_text(text)
    assert f"{path} was made with lr 0.002" in capsys.readouterr().err


def test_a_launched_command_is_a_process_of_its_own(tmp_path):
    started = Launched(["analyz"], tmp_path)
    assert started.pid != os.getpid()
    seconds, code = 0.0, None
    while code is None:  # what has ended still has them until it is polled
        seconds = max(seconds, cpu_seconds(started))
        code = started.poll()
    assert code == 2, Path(tmp_path, "stderr.log").read_text()
    assert seconds > 0
    assert "did you mean analyze?" in Path(tmp_path, "stderr.log").read_text()
