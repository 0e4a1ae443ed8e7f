"""The command line as a user meets it."""

import importlib.metadata
import os
import re
import subprocess
import sys

import pytest

import megasink
from megasink import cli
from megasink.errors import ConfigError, UserError
from megasink.options.command_parser import CommandParser
from megasink.upstream import versions


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    if command == "plan":  # whose flags are those of training
        assert shown.startswith("usage: ")
    else:
        assert shown.startswith(f"example: megasink {command}")
        assert len(shown.splitlines()) <= (65 if command == "train" else 50)


def test_the_other_flags_are_behind_help_all(capsys):
    shown = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stop:
            cli.main(["analyze", flag])
        assert stop.value.code == 0
        shown.append(capsys.readouterr().out)
    assert ["--positions" in text for text in shown] == [False, True]
    assert all("--max-samples" in text for text in shown)


def test_a_first_screen_names_flags_that_exist():
    with pytest.raises(ValueError, match="prog has no --nothing"):
        CommandParser(prog="prog").first_screen("prog", "--nothing")


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["--help"], 0)])
def test_commands_stand_in_groups(argv, code, capsys):
    assert cli.main(argv) == code
    shown = capsys.readouterr().out
    assert all(f"\n  {command} " in shown for command in cli.COMMANDS)
    assert len(re.findall(r"^\S.*:$", shown, re.M)) == len(cli.GROUPS)
    assert shown.count("start here") == 2


def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m megasink recipes | head -1; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("0", "141")  # all of it may have been written before


def test_the_version_is_the_packages():
    assert importlib.metadata.version("megasink") == megasink.__version__


def test_problems_are_numbered_in_one_message():
    assert str(ConfigError(["a"])) == "a"
    text = str(ConfigError(["first", "second"]))
    assert text.splitlines() == ["2 problems in the configuration:", "  1. first", "  2. second"]


@pytest.mark.parametrize(
    ("package", "found", "message"),
    [
        ("torch", None, "torch is not installed: pip install 'torch>=2.11'"),
        ("torch", "2.9.1+cu128", "torch 2.9.1+cu128 is not supported"),
        ("megatron-core", "0.21.0", "megatron-core 0.21.0 is not supported"),
        ("megatron-core", "0.18.3", "pip install 'megatron-core>=0.19,<0.21'"),
    ],
)
def test_versions_outside_what_was_tested_are_refused(monkeypatch, package, found, message):
    real = versions.version_of
    monkeypatch.setattr(versions, "version_of", lambda n: found if n == package else real(n))
    with pytest.raises(UserError, match=package) as error:
        versions.check_versions()
    assert message in str(error.value)


def test_the_versions_installed_here_are_fine():
    versions.check_versions()
    assert {"python", "torch", "megatron-core"} <= set(versions.versions())


def test_pypis_other_apex_is_not_taken_for_nvidias(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not versions.have_apex()
    (tmp_path / "amp_C.py").touch()
    assert versions.have_apex()
