"""Numbers of a grid: final values, curves, means over seeds, tables and figures."""

import json
import math

import matplotlib.image
import numpy as np
import pytest

from examples.replicate.grid.bands import band_of
from examples.replicate.grid.collect import of_training
from examples.replicate.grid.figures import draw_cells, draw_curves
from examples.replicate.grid.measurements import MEASUREMENTS
from examples.replicate.grid.results import (
    FORMAT,
    RunRecord,
    cell_results,
    grid_results,
    read_results,
    spread,
)
from examples.replicate.grid.table import markdown
from megasink.errors import UserError
from megasink.files.checked_fields import to_json

SEEDS = [1, 2, 3]


def record(cell, seed, loss, *, diverged=False, stage="aggregating"):
    steps = [float(step) for step in range(10, 101, 10)]
    if diverged:
        steps = steps[:4]
    curve = [steps, [loss + 100 / (step + 5) for step in steps]]
    metrics = {"steps": int(steps[-1]), "spikes": 0, "diverged": diverged}
    if not diverged:
        metrics |= {"valid_lm_loss": loss, "imbalance": loss / 10, "heads/stage": stage}
    return RunRecord(
        format=FORMAT,
        cell=cell,
        points={"attention": cell},
        seed=seed,
        flags={},
        measure={},
        metrics=metrics,
        curves={"lm_loss": curve, "imbalance": curve, "tokens": [steps, [64 * s for s in steps]]},
        seconds=12.0,
        cpu_seconds=30.0,
        start="fork",
        threads=1,
        versions={"torch": "2.15"},
        hardware="a machine",
        date="2026-11-22",
    )


def results(cells=("vanilla", "sink"), diverging="sink", missing="vanilla"):
    metrics = ["valid_lm_loss", "imbalance", "heads/stage", "diverged"]
    found = {}
    for index, name in enumerate(cells):
        seeds = SEEDS[:2] if name == missing else SEEDS
        stages = ["none", "none", "amplified"]
        records = [
            record(name, s, 3 + index + s / 10, diverged=name == diverging and s == 2, stage=stage)
            for s, stage in zip(seeds, stages, strict=False)
        ]
        left = {3: "the disk is full"} if name == missing else {}
        found[name] = cell_results({"attention": name}, records, left)
    return grid_results("Tiny | runs", SEEDS, metrics, {"attention": list(cells)}, found)


def test_mean_and_deviation_over_seeds():
    cell = results().cells["vanilla"]
    loss = cell.metrics["valid_lm_loss"]
    assert loss.values == {"1": 3.1, "2": 3.2}
    assert (loss.count, loss.mean) == (2, pytest.approx(3.15))
    assert loss.standard_deviation == pytest.approx(np.std([3.1, 3.2], ddof=1))
    assert cell.missing == {"3": "the disk is full"}
    assert cell.cpu_minutes == 1.0
    assert spread({"1": 2.0}).standard_deviation is None
    assert "heads/stage" not in cell.metrics  # names of categories have no mean


def test_a_run_that_diverged_has_no_final_loss():
    cell = results().cells["sink"]
    assert cell.diverged == [2]
    assert cell.metrics["valid_lm_loss"].values == {"1": 4.1, "3": 4.3}
    band = band_of(cell, "lm_loss")
    assert list(band.steps) == list(range(10, 101, 10))  # not cut to the shorter run
    assert band.mean[-1] == pytest.approx(4.2 + 100 / 105)
    assert band.deviation[-1] == pytest.approx(np.std([4.1, 4.3], ddof=1))
    assert len(band.alone) == 1


def test_the_table():
    lines = markdown(results()).splitlines()
    assert lines[0] == "# Tiny | runs"
    assert lines[2] == (
        "| cell | valid_lm_loss | imbalance | heads/stage | diverged | seeds | CPU minutes |"
    )
    assert lines[4] == (
        "| vanilla | 3.150 ± 0.071 | 0.3150 ± 0.0071 | 2 none | 0 of 2 | 2, 1 of 3 missing | 1.0 |"
    )
    assert lines[5] == (
        "| sink | 4.20 ± 0.14 (n = 2) | 0.420 ± 0.014 (n = 2) | 1 none, 1 amplified | 1 of 3 "
        "| 3, 1 of 3 diverged | 1.5 |"
    )
    assert "a machine; 2026-11-22" in lines[-1]


def save(folder, of):
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(to_json(of)))


def test_results_are_read_as_they_were_written(tmp_path):
    save(tmp_path / "a", results())
    assert read_results(tmp_path / "a") == results()
    told = to_json(results()) | {"format": 99}
    (tmp_path / "a" / "results.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match="has format 99, not 1"):
        read_results(tmp_path / "a")


def colored(path, *colors):
    """How many pixels of a picture have each color."""
    picture = matplotlib.image.imread(path)[..., :3]
    return [
        int((np.abs(picture - np.array(color) / 255).max(axis=2) < 0.02).sum()) for color in colors
    ]


BLUE, VERMILION = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)


def test_figures_show_every_cell(tmp_path):
    draw_cells(results(), tmp_path / "grid.png")
    draw_curves(results(), tmp_path / "curves.png")
    assert min(colored(tmp_path / "grid.png", BLUE, VERMILION)) > 100
    assert min(colored(tmp_path / "curves.png", BLUE, VERMILION)) > 500


def test_final_values_and_thinned_curves():
    lines = [
        {"iteration": i, "lm_loss": 2 + 1 / i, "imbalance": 0.5, "tokens": 64 * i}
        for i in range(1, 1001)
    ]
    lines.insert(500, {"iteration": 500, "valid_lm_loss": 2.5})
    lines.append({"iteration": 1000, "valid_lm_loss": 2.25})
    metrics, curves = of_training(lines)
    assert metrics["valid_lm_loss"] == 2.25
    assert metrics["imbalance"] == pytest.approx(0.5)
    assert metrics["lm_loss"] == pytest.approx(2.001, abs=1e-4)
    assert {"steps": 1000, "spikes": 0, "diverged": False}.items() <= metrics.items()
    assert curves["valid_lm_loss"] == [[500.0, 1000.0], [2.5, 2.25]]
    steps, values = curves["lm_loss"]
    assert len(steps) == len(values) == 100
    assert (steps[0], steps[-1]) == (10.0, 1000.0)


def test_a_last_loss_of_nan_is_a_divergence():
    lines = [{"iteration": i, "lm_loss": loss} for i, loss in enumerate([3.0, 2.0, math.nan], 1)]
    metrics, curves = of_training(lines)
    assert metrics == {"steps": 3, "spikes": 1, "diverged": True}
    assert curves["lm_loss"][1][-1] is None
    assert json.loads(json.dumps(curves), parse_constant=pytest.fail)


def test_a_category_in_a_trace_is_a_number_in_its_curve(tmp_path):
    (tmp_path / "trace.csv").write_text(
        "step,tokens,circuit_stage,sink_rate\n50,100,none,0.25\n100,200,forming,\n"
    )
    numbers, curves = MEASUREMENTS["analyze --checkpoints"].read(tmp_path)
    assert numbers == {"tokens": 200.0, "circuit_stage": "forming"}
    assert curves["circuit_stage"] == [[50.0, 100.0], [0.0, 3.0]]
    assert curves["sink_rate"] == [[50.0, 100.0], [0.25, None]]
