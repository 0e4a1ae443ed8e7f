"""The README is true: its commands run, its flags and defaults exist, its links lead somewhere."""

import os
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from megasink.options.run_options import OPTIONS
from tests.documented import PAGES
from tests.forkserver import HANG_SECONDS, put_megasink_into

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash( cluster)?\n(.*?)```", README, re.S)
RUN_HERE = [text for cluster, text in BLOCKS if not cluster]


def test_the_first_commands_are_make_targets_of_a_fresh_clone():
    targets = re.findall(r"^make (\w+)", RUN_HERE[0], re.M)
    assert targets == ["demo", "test"]
    for target, program in (("demo", "megasink demo"), ("test", "pytest")):
        planned = subprocess.run(
            ["make", "-n", target, "VENV=nothing-here"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert program in planned
        assert "make_env" in planned  # the environment is made when it is missing


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the commands read, and megasink on the path, as a fork."""
    path = tmp_path_factory.mktemp("readme")
    shutil.copy(ROOT / "README.md", path)
    shutil.copytree(ROOT / "docs", path / "docs")
    (path / ".venv" / "bin").mkdir(parents=True)
    binaries = path / ".venv" / "bin"
    (binaries / "activate").write_text(f'PATH="{binaries}:$PATH"\n')
    put_megasink_into(binaries)
    return path


def test_the_quick_start_runs_as_it_is_written(folder):
    script = "set -e\n" + "".join(RUN_HERE[1:])
    assert script.count("megasink ") == 5
    # The recipe's two minutes, cut short.
    short = "--train-iters 12 --num-layers 2"
    script = script.replace("--recipe tiny", f"--recipe tiny {short}")
    result = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": "/usr/bin:/bin"},  # megasink is where the environment is
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    suggested = re.findall(r"^next, [^:]+: megasink (\S+) ", result.stdout, re.M)
    assert suggested == ["train", "generate", "convert-to-hf", "ablate", "analyze"]
    run = folder / "runs" / "mine" / "sink"
    assert (run / "checkpoints" / "iter_0000012").is_dir()
    for name in ("config.json", "metrics.jsonl", "tensorboard", "logs", "curves.png"):
        assert (run / name).exists()
    assert (run.parent / "look" / "report.html").is_file()
    assert (run.parent / "hf" / "model.safetensors").is_file()


def test_it_fits_on_a_page():
    assert len(README.splitlines()) <= 150


def flags_of(text):
    """{flag: default} of the tables in a page."""
    return {
        flag: default
        for flags, default in re.findall(r"^\| (`--.*?) \| (.*?) \|", text, re.M)
        for flag in re.findall(r"`(--[\w-]+)`", flags)
    }


@pytest.mark.parametrize("page", ["README.md", "docs/options.md"])
def test_the_tables_of_flags_are_the_options(page):
    table = flags_of((ROOT / page).read_text())
    options = {f"--{f.name.replace('_', '-')}": f.default for o in OPTIONS for f in fields(o)}
    assert len(table) > 5
    assert set(table) <= set(options)  # the README has the main ones
    if page == "docs/options.md":
        assert set(table) == set(options)
    for flag, text in table.items():
        default, text = options[flag], text.strip("` ")
        if text == "none" and not isinstance(default, str):
            assert default is None or default is False, flag
        else:
            assert type(default)(text) == default, flag


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_that_is_named_exists(page):
    text = page.read_text()
    rooms = "attention|balance|megatron|training|data|analysis|convert|checkpoints|cli"
    for name in re.findall(rf"`((?:{rooms})/[\w/]*(?:\.py)?)`", text):
        assert (ROOT / "megasink" / name).exists(), name
    for name in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name
