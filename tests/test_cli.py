"""The command line as a user meets it."""

import importlib.metadata

import pytest

import megasink
from megasink import cli
from megasink.errors import ConfigError, UserError
from megasink.upstream import versions


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys):
    assert cli.main(["trian"]) == 2
    assert "the command 'trian' is unknown: choose " in capsys.readouterr().err


def test_what_the_user_can_mend_is_one_line_and_exit_2(tmp_path, capsys):
    assert cli.main(["plot", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megasink: error: ")
    assert len(error.splitlines()) == 1


GENERATE = ["generate", "--prompt", "def "]


@pytest.mark.parametrize(
    ("flags", "phrases"),
    [
        (["nowhere"], ["nowhere: no such folder"]),
        (["run"], ["run: no finished checkpoint"]),
        (["run/checkpoints"], ["checkpoints: no finished checkpoint"]),
        (["done", "--iteration", "7"], ["no checkpoint of iteration 7; available: 4"]),
        (["done/checkpoints/iter_0000004", "--iteration", "7"], ["not the checkpoint of"]),
        (["done"], ["not a megasink run"]),
        (
            ["run", "--prompt", "", "--temperature", "-1", "--top-p", "0", "--top-k", "-2"],
            ["--prompt is empty", "--temperature -1.0", "--top-p 0.0", "--top-k -2"],
        ),
        (["run", "--max-new-tokens", "0"], ["--max-new-tokens 0: use 1 or more"]),
    ],
)
def test_generate_refuses_before_it_loads_anything(tmp_path, monkeypatch, capsys, flags, phrases):
    monkeypatch.chdir(tmp_path)
    for name in ("run", "done"):
        (tmp_path / name / "checkpoints" / "iter_0000004").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    checkpoints = tmp_path / "done" / "checkpoints"
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    if "--iteration" in flags:
        (tmp_path / "done" / "config.json").write_text("{}")
    assert cli.main([*GENERATE, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megasink: error: ")
    for phrase in phrases:
        assert phrase in error


def test_info_says_what_runs_and_why_not_the_others(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # else the reasons are broken into many lines
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert importlib.metadata.version("torch") in out
    assert "flash-cpu" in out
    assert "float16" in out
    assert "runs on CUDA" in out.replace("\n", " ")


def test_the_version_is_the_packages():
    assert importlib.metadata.version("megasink") == megasink.__version__


def test_problems_are_numbered_in_one_message():
    assert str(ConfigError(["a"])) == "a"
    text = str(ConfigError(["first", "second"]))
    assert text.splitlines() == [
        "2 problems in the configuration:",
        "  1. first",
        "  2. second",
    ]


@pytest.mark.parametrize(
    ("package", "found", "message"),
    [
        ("torch", None, "torch is not installed: pip install 'torch>=2.11'"),
        ("torch", "2.9.1+cu128", "torch 2.9.1+cu128 is not supported"),
        ("megatron-core", "0.20.0", "megatron-core 0.20.0 is not supported"),
        ("megatron-core", "0.18.3", "pip install 'megatron-core>=0.19,<0.20'"),
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
