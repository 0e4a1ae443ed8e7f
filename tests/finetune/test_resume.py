"""A fine-tuning that is killed goes on to the same bits, or is refused."""

import contextlib
import json
import os
import shutil
import signal

import pytest
import torch

import megasink
from megasink.cli import main
from megasink.finetune import sft_training as finetune
from tests.chats import MARKED
from tests.finetune.commands import command
from tests.finetune.models import edit
from tests.forkserver import ForkServer

LONG = ("--global-batch-size", "2")  # a checkpoint every other step


def logs_of(folder):
    """All that was logged, but for the speed."""
    entries = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in e.items() if "per_second" not in k and k != "mfu"} for e in entries]


@pytest.fixture(scope="module")
def finetuned():
    """Run the command into a folder, killed at a place or to its end; see killer.py.

    A process each, of a server that has imported TRL once.
    """
    with contextlib.closing(ForkServer(imports=["tests.finetune.forked"])) as server:

        def run(root, out, place=""):
            words = command(root, *LONG, "--plugin", "tests.finetune.killer", out=out)
            environment = os.environ | {"MEGASINK_TEST_KILL": place, "OMP_NUM_THREADS": "1"}
            done = server.run(["tests.finetune.forked", *words], env=environment)
            assert done.returncode == (-signal.SIGKILL if place else 0), done.stdout + done.stderr

        yield run


@pytest.fixture(scope="module")
def stopped(root, finetuned):
    """The folder of a command that was killed between two checkpoints."""
    finetuned(root, "stopped", "step:5")
    return root / "stopped"


@pytest.fixture(scope="module")
def whole(root, finetuned):
    """The folder of a command that was not killed."""
    finetuned(root, "whole")
    assert len(logs_of(root / "whole")) > 9
    return root / "whole"


@pytest.mark.parametrize(
    "places",
    [
        ["step:5"],
        pytest.param(["step:5", "save:6", "export"], marks=pytest.mark.later),
        pytest.param(["save:2", "step:5"], marks=pytest.mark.later),
    ],
)
def test_killed_at_any_step_it_ends_at_the_same_bits(root, finetuned, stopped, whole, places):
    """Between checkpoints, while one is written (alone or behind a whole one), and in the export:
    weights, losses, what is written of each step, and the held-out loss."""
    shutil.rmtree(root / "killed", ignore_errors=True)
    if places[0] == "step:5":  # as far as the folder that was killed there
        shutil.copytree(stopped, root / "killed")
        places = places[1:]
    for place in [*places, ""]:
        finetuned(root, "killed", place)
    assert logs_of(root / "killed") == logs_of(whole)
    for name in ("model/model.safetensors", "run/head_importance.csv"):
        one, other = ((folder / name).read_bytes() for folder in (root / "killed", whole))
        assert one == other, name


def _weights(root):
    from safetensors.torch import load_file, save_file

    path = root / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, path, {"format": "pt"})


def _template(root):
    (root / "model" / "chat_template.jinja").write_text(MARKED.replace("tools", "toolbox"))


def _tokenizer(root):
    path = root / "model" / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["merges"] = state["model"]["merges"][:-3]
    path.write_text(json.dumps(state))


def _data(root):
    path = root / "chats.jsonl"
    path.write_text(path.read_text().replace("class", "clasp"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_weights, "weights "),
        (lambda root: edit(root / "model" / "config.json", rms_norm_eps=0.5),
         "config.rms_norm_eps 1e-06 -> 0.5"),
        (_template, "chat template "),
        (_tokenizer, "tokenizer "),
        (_data, "data.chats.jsonl "),
    ],
    ids=["weights", "config", "template", "tokenizer", "data"],
)  # fmt: skip
def test_another_model_or_data_is_refused(root, stopped, capsys, change, named):
    before = contents(stopped)
    kept = {path: path.read_bytes() for path in [*(root / "model").iterdir(), root / "chats.jsonl"]}
    try:
        change(root)
        assert main(command(root, *LONG, out="stopped")) == 2
    finally:
        for path, data in kept.items():
            path.write_bytes(data)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"megasink: error: --output {stopped} has results of other settings (")
    assert f"({named}" in line
    assert " -> " in line
    assert line.count(" -> ") == 1
    assert contents(stopped) == before


@pytest.mark.parametrize("package", ["torch", "megasink", "trl"])
def test_another_version_is_refused(root, stopped, capsys, monkeypatch, package):
    if package == "trl":
        monkeypatch.setattr(finetune, "version", lambda name: "2.99.0")
    else:
        monkeypatch.setattr(
            {"torch": torch, "megasink": megasink}[package], "__version__", "2.99.0"
        )
    before = contents(stopped)
    assert main(command(root, *LONG, out="stopped")) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{package} " in line
    assert " -> 2.99.0" in line
    assert contents(stopped) == before


def contents(folder):
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
