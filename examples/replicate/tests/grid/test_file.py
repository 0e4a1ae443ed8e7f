"""Grid files: what they say, and every problem in one message."""

import json
import re
from pathlib import Path

import pytest

from examples.replicate.grid.file import filled, read_grid
from examples.replicate.grid.plan import begin, plan
from examples.replicate.tests.grid.files import POINTS, TRACE, write
from megasink.errors import ConfigError, UserError
from megasink.training import preflight
from tests import parsing

DOCS = Path(__file__).parents[2] / "grid" / "README.md"
LOSS = '[axes.loss]\n"no loss" = {head-balance-coeff = 0}\nloss = {head-balance-coeff = 0.1}\n'


def test_a_run_for_every_combination_and_seed(tmp_path):
    grid = read_grid(write(tmp_path / "a.toml", rest=LOSS, metrics=["lm_loss"]))
    names = ["vanilla, no loss", "vanilla, loss", "sink, no loss", "sink, loss"]
    assert [cell.name for cell in grid.cells] == names
    assert grid.cells[1].points == {"attention": "vanilla", "loss": "loss"}
    runs = plan(grid, tmp_path / "out")
    # All cells with one seed before the next seed: something to look at early.
    assert [run.name for run in runs[:5]] == [f"{n}, seed 1" for n in names] + [
        "vanilla, no loss, seed 2"
    ]
    run = runs[4]
    assert run.folder == tmp_path / "out" / "vanilla-no-loss" / "seed-2"
    assert run.record == tmp_path / "out" / "vanilla-no-loss" / "seed-2.json"
    words = " ".join(run.flags)
    assert "--seed 2 " in words
    assert "--attention-variant vanilla --head-balance-coeff 0" in words
    assert "--ranks" not in words
    assert (run.ranks, run.steps, run.way.name) == (1, 40, "fork")
    assert not (tmp_path / "out").exists()


def test_the_file_of_the_documentation(tmp_path, monkeypatch):
    """On data without contents, which only the launcher's own check would read."""
    monkeypatch.setattr(preflight, "check", parsing.check)
    blocks = re.findall(r"^```toml\n(.*?)^```$", DOCS.read_text(), re.M | re.S)
    path = tmp_path / "balance.toml"
    path.write_text(blocks[0])
    data = tmp_path / "out" / "data"
    (data / "text-tokenizer").mkdir(parents=True)
    for suffix in ("bin", "idx"):
        (data / f"text.{suffix}").write_bytes(b"")
    assert len(plan(read_grid(path), tmp_path / "out")) == 12


def test_placeholders(tmp_path):
    words = ["{out}/data", "{run}/heads", "{}", "a{out}b{run}"]
    assert filled(words, out=tmp_path, run=tmp_path / "r") == [
        f"{tmp_path}/data",
        f"{tmp_path}/r/heads",
        "{}",
        f"a{tmp_path}b{tmp_path}/r",
    ]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("ranks = 1", "ranks = 2", "it has 2 ranks"),
        ("ranks = 1", "tensor-model-parallel-size = 2", "it has 2 ranks"),
        ("cpu = true", "cpu = false", "it may use GPUs"),
    ],
)
def test_what_is_not_one_rank_on_the_cpu_is_launched(tmp_path, old, new, why):
    path = write(tmp_path / "a.toml", metrics=["lm_loss"], rest="")
    path.write_text(path.read_text().replace(old, new))
    runs = plan(read_grid(path), tmp_path / "out")
    assert {run.way.name for run in runs} == {"launch"}
    assert why in runs[0].way.why


FORM = {
    "recipe": (
        {"flags": 'recipe = "p0-0.6b"'},
        "flags.recipe is set by nothing: a grid is whole in its file: drop it",
    ),
    "key": ({"top": "seds = 1"}, "the key 'seds' is unknown", "did you mean seeds?"),
    "seeds-twice": ({"seeds": [1, 2, 1]}, "seeds has 1 twice"),
    "no-seeds": ({"seeds": []}, "seeds: give a list of whole numbers"),
    "metrics": ({"metrics": []}, "metrics: give a list of names"),
    "dashes": ({"flags": '"--bf16" = true'}, "flags.--bf16: write bf16, without dashes"),
    "seed-as-flag": ({"flags": "seed = 3"}, "flags.seed is set in seeds: drop it"),
    "value": ({"flags": "bf16 = {a = 1}"}, "flags.bf16 is {'a': 1}: give a number"),
    "empty-list": ({"flags": "split = []"}, "flags.split is []: give a list"),
    "placeholder": (
        {"flags": 'data-path = "{output}/x"'},
        "flags.data-path: the placeholder 'output' is unknown: choose out, run",
    ),
    "two-axes": (
        {"rest": '[axes.b]\nx = {attention-variant = "sink"}\n'},
        "attention-variant is set by the axes attention and b: set it in one of them",
    ),
    "no-points": ({"rest": "[axes.b]\n"}, "axes.b: give points"),
    "measure-key": ({"rest": '[measure.a]\ncomand = "x"\n'}, "measure.a: give command, and no"),
    "no-output": (
        {"rest": '[measure.a]\ncommand = "analyze {run} --output {run}/b"\n'},
        "measure.a: the command does not write {run}/a: add --output {run}/a",
    ),
    "quotation": (
        {"rest": '[measure.a]\ncommand = "analyze \'{run}"\n'},
        "No closing quotation",
    ),
    "one-folder": (
        {"points": '"a b" = {lr = 1}\n"a-b" = {lr = 2}\n'},
        "the cell 'a-b' has the folder 'a-b', as has 'a b': rename a point",
    ),
    "reserved": ({"points": "data = {lr = 1}\n"}, "the cell 'data' has the folder 'data'"),
}
PLANNED = {
    "flag": (
        {"flags": "num-layer = 3"},
        "unknown: --num-layer 3: did you mean --num-layers?",
    ),
    "flag-of-a-cell": (
        {"points": "a = {lr = 1}\nb = {lr = -1}\n"},
        "b: --lr -1.0 is negative",
    ),
    "combination": (
        {"points": "a = {lr = 1}\nb = {num-attention-heads = 5}\n"},
        "b: --hidden-size 64 is not divisible by --num-attention-heads 5",
    ),
    "ranks": ({"points": "a = {ranks = 0}\n"}, "ranks 0: use a whole number, 1 or more"),
    "metric": (
        {"metrics": ["imbalanse"]},
        "the metric 'imbalanse' is unknown: choose lm_loss",
        "did you mean imbalance?",
    ),
    "metric-of-no-measurement": (
        {"metrics": ["heads/sink_rate"]},
        "the metric 'heads/sink_rate' is of the measurement 'heads', which is not in the file",
    ),
    "metric-of-measurement": (
        {"metrics": ["trace/sink_rat"]},
        "the metric of trace 'sink_rat' is unknown",
        "did you mean sink_rate?",
    ),
    "data-of-no-name": (
        {"rest": TRACE.replace("{out}/data/letters", "{data}")},
        "measure.trace: {data} in 'vanilla', which has no data of one name",
    ),
    "command": (
        {"rest": '[measure.trace]\ncommand = "generate {run} {run}/trace"\n'},
        "measure.trace: the command 'generate' is unknown: choose analyze",
    ),
    "flag-of-command": (
        {"rest": '[measure.trace]\ncommand = "analyze {run} --outptu 3 --output {run}/trace"\n'},
        "measure.trace: unknown: --outptu 3: did you mean --output?",
    ),
}


@pytest.mark.parametrize("name", FORM | PLANNED)
def test_a_problem_is_told_before_the_first_run(name, tmp_path):
    parts, *phrases = (FORM | PLANNED)[name]
    path = write(tmp_path / "a.toml", **parts)
    with pytest.raises(ConfigError) as refused:
        plan(read_grid(path), tmp_path / "out")
    for phrase in phrases:
        assert phrase in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_all_problems_are_told_together(tmp_path):
    parts = {"flags": "num-layer = 3", "metrics": ["imbalanse", "a/b"]}
    path = write(
        tmp_path / "a.toml", points="a = {lr = 1}\nb = {num-attention-heads = 5}\n", **parts
    )
    with pytest.raises(ConfigError) as refused:
        plan(read_grid(path), tmp_path / "out")
    # The unknown flag is a problem of every cell: told once, without their names.
    assert len(refused.value.problems) == 4
    assert [text for text in refused.value.problems if "num-layer" in text] == [
        f"{path}: unknown: --num-layer 3: did you mean --num-layers?"
    ]


def test_what_is_not_toml_is_told(tmp_path):
    (tmp_path / "a.toml").write_text("title = \n")
    with pytest.raises(UserError, match=r"a\.toml is not TOML: Invalid value \(at line 1"):
        read_grid(tmp_path / "a.toml")


@pytest.fixture
def begun(tmp_path):
    """A folder where a run of seed 1 has begun in every cell."""
    grid = read_grid(write(tmp_path / "a.toml"))
    out = tmp_path / "out"
    runs = plan(grid, out)
    begin(grid, out, runs)
    for run in runs:
        if run.seed == 1:
            run.folder.mkdir()
            (run.folder / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 2.0}\n')
    return out


def test_more_points_and_seeds_are_welcome(begun, tmp_path):
    path = write(tmp_path / "b.toml", points=POINTS + "fast = {lr = 1}\n", seeds=[3, 2, 1])
    assert len(plan(read_grid(path), begun)) == 9


@pytest.mark.parametrize(
    ("parts", "phrase"),
    [
        ({"flags": "clip-grad = 2"}, "'vanilla' had no clip-grad"),
        ({"seeds": [2, 3]}, "it has seed 1, and the file has not"),
        ({"points": 'sink = {attention-variant = "sink"}\n'}, "it has the cell 'vanilla', and"),
    ],
)
def test_the_folder_of_another_grid_is_refused(begun, tmp_path, parts, phrase):
    path = write(tmp_path / "b.toml", **parts)
    with pytest.raises(ConfigError, match="holds another grid") as refused:
        plan(read_grid(path), begun)
    assert phrase in str(refused.value)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "out" / "sink").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds sink, which is not of a grid"):
        plan(read_grid(write(tmp_path / "a.toml")), tmp_path / "out")
    (tmp_path / "out" / "grid.json").write_text(json.dumps({"cells": 3}))
    with pytest.raises(ConfigError, match=r"grid\.json cannot be read"):
        plan(read_grid(write(tmp_path / "a.toml")), tmp_path / "out")
