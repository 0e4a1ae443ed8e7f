"""CONTRIBUTING.md is true: its modules and commands run as they are written, from outside."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MODULES = dict(re.findall(r"^```python (\w+\.py)\n(.*?)^```$", PAGE, re.M | re.S))
COMMANDS = dict(re.findall(r"^```bash (\w+)\n(.*?)^```$", PAGE, re.M | re.S))
# How many files of the package and its tests one of them may touch.
MOST_FILES = {"target": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the modules and the texts of the repository, away from it."""
    path = tmp_path_factory.mktemp("contributing")
    shutil.copy(ROOT / "README.md", path)
    shutil.copytree(ROOT / "docs", path / "docs")
    for name, text in MODULES.items():
        (path / name).write_text(text)
    return path


def run(script, folder):
    """Run lines of a shell; the environment of this Python is the active one."""
    binaries = Path(sys.executable).parent
    return subprocess.run(
        ["bash", "-ec", script],
        cwd=folder,
        env={**os.environ, "PATH": f"{binaries}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def test_a_target_of_ones_own_makes_the_round_trip(folder):
    done = run(COMMANDS["target"], folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.count("target: Phi3ForCausalLM (phi3): asked for") == 2
    # Against Megatron, from both sides and once more.
    assert len(re.findall(r"verified on \d+ tokens of text, float32: logits", done.stdout)) == 3
    first, second = (folder / name / "model.safetensors" for name in ("exported", "again"))
    assert first.read_bytes() == second.read_bytes()


def test_without_its_plugin_a_target_is_unknown(folder):
    done = run("megasink convert-to-hf RUN OUT --target phi3", folder)
    assert done.returncode == 2
    assert "--target 'phi3' is unknown" in done.stderr
    assert "one of your own comes with --plugin MODULE" in done.stderr


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", PAGE)
    assert len(links) > 3
    assert [link for link in links if not (ROOT / link).exists()] == []


def listed(what):
    """The files that the page says something of its kind touches in the package."""
    _, _, text = PAGE.partition(f"\nIn the package a {what} touches ")
    return re.findall(r"^- `([\w/]+\.py)`", text.partition("\n#")[0], re.M)


@pytest.mark.parametrize("what", MOST_FILES)
def test_in_the_package_it_touches_few_files_that_exist(what):
    files = listed(what)
    assert 0 < len(files) <= MOST_FILES[what]
    for file in files:
        assert (ROOT / file).is_file(), file


@pytest.mark.parametrize(
    ("what", "registered"),
    [("target", "from megasink.convert.targets import TARGETS as names")],
)
def test_the_same_code_works_inside_of_the_package(tmp_path, what, registered):
    shutil.copytree(ROOT / "megasink", tmp_path / "megasink")
    code = MODULES[f"my_{what}.py"]
    with (tmp_path / listed(what)[0]).open("a") as file:
        file.write(re.sub(r'^""".*?"""', "", code, flags=re.S))
    (name,) = re.findall(r'^ *name="([\w-]+)"', code, re.M)
    done = subprocess.run(
        [sys.executable, "-c", f"{registered}; assert {name!r} in names"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
