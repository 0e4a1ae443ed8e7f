"""Plugins: who may name one, when it is imported, and what is said of one that does not work."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasink import cli, plugins
from megasink.checkpoints.saved_arguments import read_arguments
from megasink.convert.targets import TARGETS
from megasink.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
TARGET = """
import dataclasses
from megasink.convert.targets import TARGETS, register
register(dataclasses.replace(TARGETS["llama"], name={name!r}))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, empty; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "LOADED", {})
    targets, modules = dict(TARGETS), set(sys.modules)
    yield tmp_path
    TARGETS.clear()
    TARGETS.update(targets)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_module_of_the_current_directory_registers_before_flags_are_read(folder, capsys):
    (folder / "my_targets").mkdir()
    (folder / "my_targets" / "__init__.py").write_text("from my_targets import one")
    (folder / "my_targets" / "one.py").write_text(TARGET.format(name="mine"))
    command = ["convert-to-hf", "RUN", "--output", "OUT", "--target", "mine"]
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert "--target 'mine' is unknown" in error
    assert "to use your own, add --plugin MODULE" in error
    assert cli.main([*command, "--plugin", "my_targets"]) == 2
    assert "RUN" in (error := capsys.readouterr().err)
    assert "unknown" not in error


def test_doctor_lists_plugins_and_what_they_registered(folder, capsys):
    for name in ("first", "second", "third"):
        (folder / f"{name}.py").write_text(TARGET.format(name=f"of-{name}"))
    (folder / "third.py").write_text("")
    info = folder / "package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[megasink.plugins]\nx = second\n")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    assert cli.main(["doctor", "--no-self-test", "--plugin=first", "--plugin", "third"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [words[1] for words in lines if words[:1] == ["plugin"]] == [
        "second (package installed): target of-second",
        "first (--plugin): target of-first",
        "third (--plugin): registers nothing",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no module of that name in FOLDER or in the installed packages"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' "
         "(FOLDER/broken.py:1: import no_such_module)"),
        ("x = (", "'(' was never closed (FOLDER/broken.py:1)"),
        ("x = 1\nx / 0", "ZeroDivisionError: division by zero (FOLDER/broken.py:2: x / 0)"),
        ("import json\njson.loads('{')", "(FOLDER/broken.py:2: json.loads('{'))"),
        ("raise SystemExit(0)", "SystemExit: 0 (FOLDER/broken.py:1: raise SystemExit(0))"),
        ("raise ValueError('\x1b[31m\\nred')", "ValueError: \\x1b[31m\\nred (FOLDER"),
        (TARGET.format(name="qwen2"), "conversion target 'qwen2' is registered twice: rename one "
         "(FOLDER/broken.py:4: register("),
    ],
)  # fmt: skip
def test_one_that_cannot_be_imported_is_one_line_with_its_place(folder, capsys, text, said):
    if text is not None:
        (folder / "broken.py").write_text(text)
    assert cli.main(["report", "--plugin", "broken", "--output", "x", "y"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megasink: error: --plugin broken (--plugin): ")
    assert said.replace("FOLDER", str(folder)) in error
    assert error.count("\n") == 1
    assert "\x1b" not in error


@pytest.mark.parametrize("value", ["my_module.py", "./my_module", "", "a..b", "a;b"])
def test_the_name_is_that_of_a_module(folder, value):
    with pytest.raises(UserError, match="give the name of a Python module"):
        plugins.load([f"--plugin={value}"])


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--lr", "1", "--plugin", "a", "--plugin=b.c", "--plugin", "a"], ["a", "b.c"]),
        (["--plugin"], []),
        (["--plugin", "--resume"], []),
        (["RUN", "--", "--plugin", "a"], []),
        ([], []),
    ],
)
def test_the_flags_of_a_command_line_are_handed_on(argv, wanted):
    words = plugins.flags(argv)
    assert (words[::2], words[1::2]) == (["--plugin"] * len(wanted), wanted)


# Of train: tests/training/test_launch.py has every flag of ours.
MEETING = sorted({*cli.COMMANDS} - {*cli.WITHOUT_PLUGINS, "train"})


@pytest.mark.parametrize("command", MEETING)
def test_every_command_that_meets_a_registry_has_the_flag(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help" if command == "plan" else "--help-all"])
    assert "--plugin MODULE" in capsys.readouterr().out


@pytest.mark.parametrize(
    "start", [["-m", "megasink.training"], [str(ROOT / "examples" / "pretrain_gpt_sink.sh")]]
)
def test_every_rank_imports_it_from_the_current_directory(tmp_path, start):
    (tmp_path / "broken.py").write_text("assert not 'reached'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *start, "--plugin", "broken", "--no-such-flag"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 2
    assert done.stderr.startswith("megasink: error: --plugin broken (--plugin): AssertionError")


def test_a_run_names_its_plugin_and_imports_none(folder, capsys):
    (folder / "crafted.py").write_text("open('imported', 'w')")
    arguments = {"attention_variant": "mine", "padded_vocab_size": 8, "ffn_hidden_size": 8}
    config = folder / "config.json"
    config.write_text(json.dumps({"arguments": arguments}))
    with pytest.raises(UserError, match=r"'mine' is unknown.* add --plugin MODULE"):
        read_arguments(config)
    recorded = ["crafted", "\x1b[31m", "x" * 1000, *"abcdef"]
    config.write_text(json.dumps({"arguments": arguments | {"plugin": recorded}}))
    with pytest.raises(UserError) as raised:
        read_arguments(config)
    text = str(raised.value)
    assert "add --plugin MODULE, which runs its code; the run was trained with" in text
    assert "--plugin crafted --plugin \\x1b[31m --plugin xxx" in text
    assert len(text) < 700
    assert not (folder / "imported").exists()
