"""A fine-tuning that is killed goes on to the same bits, or is refused."""

import json
import signal
from pathlib import Path

import pytest
import torch

import megasink
from megasink.cli import main
from megasink.finetune import run as finetune
from tests.chats import MARKED
from tests.finetune.commands import command, ended
from tests.finetune.models import edit

LONG = ("--global-batch-size", "2")  # a checkpoint every other step


def logs_of(folder):
    """All that was logged, but for the speed."""
    entries = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in e.items() if "per_second" not in k and k != "mfu"} for e in entries]


def killed(root, out, *where):
    """Kill the command at each place, one after another; see killer.py."""
    words = ["megasink", *command(root, *LONG, "--plugin", "tests.finetune.killer", out=out)]
    for place in where:
        code, said = ended(words, Path.cwd(), MEGASINK_TEST_KILL=place)
        assert code == -signal.SIGKILL, said
    return words


def test_killed_at_any_step_it_ends_at_the_same_bits(root):
    """Between checkpoints, while one is written (alone or behind a whole one), and in the export:
    weights, losses, what is written of each step, and the held-out loss."""
    words = killed(root, "killed", "save:2", "step:5", "save:6", "export")
    code, said = ended(words, Path.cwd(), MEGASINK_TEST_KILL="")
    assert code == 0, said
    code, said = ended([*words, "--output", root / "whole"], Path.cwd(), MEGASINK_TEST_KILL="")
    assert code == 0, said
    assert len(logs_of(root / "whole")) > 9
    assert logs_of(root / "killed") == logs_of(root / "whole")
    for name in ("model/model.safetensors", "run/head_importance.csv"):
        one, other = ((root / out / name).read_bytes() for out in ("killed", "whole"))
        assert one == other, name


@pytest.fixture(scope="module")
def stopped(root):
    """The folder of a command that was killed."""
    killed(root, "stopped", "step:5")
    return root / "stopped"


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
    assert line.startswith(f"megasink: error: --output {stopped} holds results of other settings (")
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
