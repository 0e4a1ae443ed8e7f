"""Experiments are read and checked before anything runs, resumed, and summarized."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from examples.replicate import experiment, measuring, record, runner
from examples.replicate.experiment import FORMS, Corpus, letters, read_experiment, read_toml
from examples.replicate.grid.plan import plan
from examples.replicate.grid.results import FORMAT, RunRecord
from examples.replicate.measures import read_measures
from megasink.errors import ConfigError, UserError
from megasink.files.checked_fields import to_json
from megasink.training import preflight
from tests import parsing

GRID = """
title = "Two"
seeds = [1, 2, 3]
metrics = ["imbalance", "valid_lm_loss"]

[axes.loss]
"no loss" = {head-balance-coeff = 0}
loss = {head-balance-coeff = 1e-2}
"""
TOLD = """
title = "The loss"
rows = ["P0.21"]
predicted = 2026-11-22
prediction = "It falls."
curves = ["imbalance"]

[[claim]]
says = "The loss lowers the imbalance"
metric = "imbalance@50%"
lower = "loss"
higher = "no loss"
"""
MEASURES = """
metrics = ["ablation/ahon_ln/auc", "ablation/ahon_either/rank", "ablation/random/auc"]

[measure.ablation]
command = "ablate {run} --data {runs}/data/sample.jsonl --score ahon ahon_ln --output {measured}"
"""
USES = """
title = "Heads"
rows = ["P3.16"]
uses = "y"
predicted = 2026-11-22
prediction = "AHON."

[[claim]]
says = "AHON costs less than random heads"
cell = "loss"
lower_metric = "ablation/ahon_ln/auc"
higher_metric = "ablation/random/auc"
"""


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two experiments: y of a grid, z of its runs."""
    for name, told, form in (("y_loss", TOLD, GRID), ("z_heads", USES, MEASURES)):
        (tmp_path / "files" / name).mkdir(parents=True)
        (tmp_path / "files" / name / "experiment.toml").write_text(told)
        (tmp_path / "files" / name / "fast.toml").write_text(form)
    monkeypatch.setattr(experiment, "FOLDER", tmp_path / "files")
    return tmp_path / "files"


def write_records(grid, out, diverged=()):
    """What the grid leaves."""
    for number, cell in enumerate(grid.cells):
        for seed in grid.seeds:
            gone = (cell.name, seed) in diverged
            last = 1.0 - 0.5 * number + 0.01 * seed
            made = RunRecord(
                format=FORMAT,
                cell=cell.name,
                points=cell.points,
                seed=seed,
                flags=cell.flags,
                measure={},
                metrics={"diverged": True}
                if gone
                else {"diverged": False, "imbalance": last, "valid_lm_loss": 2.0},
                curves={} if gone else {"imbalance": [[0.0, 100.0], [0.0, last]]},
                seconds=2.0,
                cpu_seconds=3.0,
                start="fork",
                threads=1,
                versions={},
                hardware="",
                date="2026-11-22",
            )
            path = out / cell.folder / f"seed-{seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(to_json(made)))


def forms_here():
    return [
        (name, form)
        for name, folder in letters().items()
        for form in FORMS
        if (folder / f"{form}.toml").is_file()
    ]


@pytest.mark.parametrize(("name", "form"), forms_here())
def test_the_experiments_have_no_problem(name, form):
    folder = letters()[name]
    uses = read_toml(folder / "experiment.toml").get("uses")
    if uses and not (letters().get(uses, Path("nowhere")) / f"{form}.toml").is_file():
        pytest.skip(f"experiment {uses} has no {form} form yet")
    read = read_experiment(folder, form)
    assert read.claims
    assert len(read.prediction) > 100


@pytest.mark.parametrize(("name", "form"), forms_here())
def test_the_trainer_takes_the_flags_of_every_cell(name, form, tmp_path, monkeypatch):
    """On data without contents, which only the launcher's own check would read."""
    monkeypatch.setattr(preflight, "check", parsing.check)
    if (grid := read_experiment(letters()[name], form).grid) is None:
        return
    for corpus in re.findall(
        r"{out}/data/([\w.-]+)", (letters()[name] / f"{form}.toml").read_text()
    ):
        path = tmp_path / "data" / corpus
        (path if "tokenizer" in corpus else path.parent).mkdir(parents=True, exist_ok=True)
        for end in ("", ".bin", ".idx") if "tokenizer" not in corpus else ():
            path.with_name(corpus + end).touch()
    runs = plan(replace(grid, seeds=grid.seeds[:1]), tmp_path)
    assert len({" ".join(run.flags) for run in runs}) == len(grid.cells)  # no two are the same


def test_problems_of_all_kinds_come_together(folders):
    told = TOLD.replace('rows = ["P0.21"]', 'rows = ["P9.1"]\nrow = 3').replace(
        '"It falls."', '" "'
    )
    (folders / "y_loss" / "experiment.toml").write_text(told + '[[large]]\nsays = "x"\n')
    with pytest.raises(ConfigError) as refused:
        read_experiment(folders / "y_loss", "fast")
    said = str(refused.value)
    for problem in (
        "'P9.1' is not a row",
        "the key 'row' is unknown",
        "prediction is empty",
        "large 1: give says and command",
    ):
        assert problem in said


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('lower = "loss"', 'lower = "los"', "cell 'los' is unknown: choose no loss, loss"),
        ("imbalance@50%", "imbalanc", "metric 'imbalanc' is unknown"),
        ('curves = ["imbalance"]', 'curves = ["x"]', "curves 'x' is unknown"),
        (
            "[[claim]]",
            '[data.text]\nmake = "corpora.nothing"\n[[claim]]',
            "no function corpora.noth",
        ),
        ('metric = "imb', 'forms = ["slow"]\nmetric = "imb', "give a list of fast and full"),
    ],
)
def test_a_problem_names_what_is_wrong(folders, old, new, problem):
    path = folders / "y_loss" / "experiment.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=problem):
        read_experiment(folders / "y_loss", "fast")


def test_a_form_that_is_missing_is_named(folders):
    with pytest.raises(UserError, match="no such file: the experiment has no full form"):
        read_experiment(folders / "y_loss", "full")
    (folders / "z_heads" / "full.toml").write_text(MEASURES)
    with pytest.raises(UserError, match="y_loss/full"):
        read_experiment(folders / "z_heads", "full")


def test_two_seeds_are_refused(folders):
    path = folders / "y_loss" / "fast.toml"
    path.write_text(GRID.replace("[1, 2, 3]", "[1, 2]"))
    with pytest.raises(ConfigError, match="2 seeds: verdicts take 3"):
        read_experiment(folders / "y_loss", "fast")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("ablate {run}", "ablat {run}", "'ablat' is unknown: choose ablate"),
        ("--output {measured}", "--output {out}", "placeholder 'out' is unknown"),
        ("ablation/random/auc", "ablation/awft/auc", "metrics: 'ablation/awft/auc' is unknown"),
        ("metrics =", 'cells = ["a"]\nmetrics =', "cells: 'a' is unknown"),
    ],
)
def test_wrong_measurements_are_refused(folders, old, new, problem):
    path = folders / "z_heads" / "fast.toml"
    path.write_text(MEASURES.replace(old, new))
    with pytest.raises(ConfigError, match=problem):
        read_measures(path, folders / "y_loss" / "fast.toml")


def test_a_run_of_the_grid_becomes_a_results_file(folders, tmp_path, monkeypatch, capsys):
    asked = []

    def grid(words):
        asked.append(words)
        read = read_experiment(folders / "y_loss", "fast")
        write_records(read.grid, tmp_path / "out" / "y-fast")
        return 0

    monkeypatch.setattr(runner.grid, "main", grid)
    flags = ["--output", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    assert runner.main(["y", *flags, "--jobs", "2"]) == 0
    assert asked[0][1:] == ["--output", str(tmp_path / "out" / "y-fast"), "--jobs", "2"]
    result = record.read_result(tmp_path / "results" / "y-fast.json")
    assert result.cells["no loss"]["imbalance@50%"] == pytest.approx([0.505, 0.51, 0.515])
    assert result.cells["loss"]["imbalance"] == pytest.approx([0.51, 0.52, 0.53])
    assert result.verdicts[0].verdict == "reproduces"
    assert (result.seconds, result.cpu_seconds, result.runs) == (12, 18, 6)
    assert result.curves["imbalance"]["loss"].mean == pytest.approx([0, 0.52])
    assert (tmp_path / "out" / "y-fast" / "results-y-fast.png").is_file()
    assert "The loss lowers the imbalance: reproduces" in capsys.readouterr().out
    path = folders / "y_loss" / "experiment.toml"
    path.write_text(TOLD.replace('["imbalance"]', '["trace/sink_rate"]'))
    with pytest.raises(UserError, match="no run has trace/sink_rate"):
        runner.main(["y", *flags])
    monkeypatch.setattr(runner.grid, "main", lambda words: 2)
    assert runner.main(["y", *flags]) == 2


def test_measurements_need_the_runs(folders, tmp_path):
    flags = ["--output", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    with pytest.raises(ConfigError, match="7 problems") as refused:
        runner.main(["z", *flags])
    assert "run the experiment that makes them first" in str(refused.value)


def test_measurements_are_planned_and_read(folders, tmp_path, monkeypatch):
    read = read_experiment(folders / "z_heads", "fast")
    runs, out = tmp_path / "y-fast", tmp_path / "z-fast"
    grid = read_experiment(folders / "y_loss", "fast").grid
    write_records(grid, runs, diverged=[("no loss", 2)])
    monkeypatch.setattr(measuring, "find_checkpoint", lambda folder: folder)
    records = measuring.used_runs(read.measures, runs)
    planned = measuring.plan(read.measures, records, runs, out)
    assert len(planned) == 5  # the one that diverged has no model
    first = planned[0]
    run = runs / "no-loss" / "seed-1"
    assert first.words[:4] == ["ablate", str(run), "--data", str(runs / "data" / "sample.jsonl")]
    assert first.words[-1] == str(out / "no-loss" / "seed-1" / "ablation")
    first.done.parent.mkdir(parents=True)
    first.done.write_text(json.dumps({"words": ["ablate", "other"]}))
    with pytest.raises(ConfigError, match="made by another command: delete it"):
        measuring.plan(read.measures, records, runs, out)
    for one in planned:
        one.done.parent.mkdir(parents=True, exist_ok=True)
        one.done.write_text(json.dumps({"words": one.words, "seconds": 2.0, "cpu_seconds": 3.0}))
    measuring.measure_all(planned, 2)  # nothing is left
    program = measuring.PROGRAMS["ablate"]
    numbers = dict.fromkeys(program.numbers(first.words), 1.0)
    monkeypatch.setitem(
        measuring.PROGRAMS,
        "ablate",
        type(program)(program.main, program.writes, program.numbers, lambda folder: numbers),
    )
    for cell in read.measures.cells:
        for seed in read.measures.seeds:
            folder = runs / cell.folder / f"seed-{seed}"
            folder.mkdir()
    measured = list(measuring.measured_runs(planned, records))
    assert [(one.cell, one.seed, one.cpu_seconds) for one in measured[:3]] == [
        *(("no loss", 1, 3.0), ("no loss", 2, 0.0), ("no loss", 3, 3.0))
    ]
    assert measured[1].metrics == {}
    assert measured[0].metrics["ablation/ahon_either/rank"] == 1.0
    assert measured[0].curves["imbalance"][0] == [0.0, 100.0]


def test_a_corpus_is_made_once(tmp_path):
    made = []

    def make(folder, name, **arguments):
        made.append((folder, name, arguments))

    corpus = Corpus("text", make, "languages.write_text", {"documents": 3})
    runner.make_corpus(corpus, tmp_path / "data")
    runner.make_corpus(corpus, tmp_path / "data")
    assert made == [(tmp_path / "data", "text", {"documents": 3})]
    with pytest.raises(UserError, match="was made in another way"):
        runner.make_corpus(Corpus("text", make, "languages.write_text", {}), tmp_path / "data")


def test_a_program_of_its_own_is_read_and_summarized(tmp_path):
    told = read_experiment(letters()["h"], "full")
    assert told.program is not None
    assert told.cells == ["vanilla", "sink", "gated"]
    run = record.Run(
        cell="sink",
        seed=1,
        metrics=dict.fromkeys(told.program.program.metrics, 0.5),
        curves=dict.fromkeys(told.curves, ([64, 1024], [1.0, 0.5])),
        seconds=1,
        cpu_seconds=1,
    )
    runs = [replace(run, cell=cell, seed=seed) for cell in told.cells for seed in (1, 2, 3)]
    found = runner.summarize(told, runs, tmp_path)
    assert (found.x, found.runs, found.seeds) == ("tokens of the document", 9, [1, 2, 3])
    assert found.curves["trained_at_64_yarn"]["sink"].mean == [1.0, 0.5]
