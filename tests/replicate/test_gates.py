"""Experiment c: the trainer takes the flags of every cell, and every claim is about cells."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from examples.replicate.grid.file import read_grid
from examples.replicate.grid.plan import plan

FOLDER = Path(__file__).parents[2] / "examples" / "replicate" / "c_gates"
CELLS = {"fast": 10, "full": 15}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The names of the data, which nobody reads before a run starts."""
    data = tmp_path_factory.mktemp("gates") / "data"
    for tokenizer in ("tokenizer", "text-tokenizer"):
        (data / tokenizer).mkdir(parents=True)
    for name in ("triggers", "text"):
        for end in ("bin", "idx"):
            (data / f"{name}.{end}").touch()
    return data.parent


@pytest.mark.parametrize("form", CELLS)
def test_the_trainer_takes_the_flags_of_every_cell(form, out):
    grid = read_grid(FOLDER / f"{form}.toml")
    assert len(grid.seeds) >= 3  # what a verdict takes
    runs = plan(replace(grid, seeds=grid.seeds[:1]), out)
    assert len(runs) == CELLS[form]
    assert len({" ".join(run.flags) for run in runs}) == len(runs)


@pytest.mark.parametrize("form", CELLS)
def test_claims_are_about_cells_and_metrics_of_the_grid(form):
    grid = read_grid(FOLDER / f"{form}.toml")
    claims = tomllib.loads((FOLDER / "experiment.toml").read_text())["claim"]
    cells = {cell.name for cell in grid.cells}
    for claim in claims:
        if form in claim.get("forms", CELLS):
            assert claim["metric"] in grid.metrics
            assert {claim[k] for k in ("lower", "higher") if k in claim} <= cells
            assert set(claim.get("increasing", [])) <= cells
