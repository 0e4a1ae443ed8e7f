"""What `pip install megasink` gives without the extra "train", where megatron cannot be imported.

Not covered: other platforms than this one, except for whether their wheels exist (`network`).
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from tests.light import environment
from tests.test_packaging import ROOT, setup_arguments

SESSION = Path(__file__).with_name("session.py")


def told_in(light: Path, folder: Path) -> dict[str, Any]:
    """What session.py tells in an environment."""
    folder.mkdir()
    done = environment.run(light, str(SESSION), str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def check(told: dict[str, Any]) -> None:
    assert told["megatron"] is False
    for name, (code, line) in told["refused"].items():
        assert code == 2
        cure = "needs megasink[train]: pip install 'megasink[train]'"
        assert line == f"megasink: error: megasink {name} {cure}"
    assert told["loaded by refusals"] == []
    code, line = told["a run"]
    assert code == 2
    assert "needs megasink[train]: pip install" in line
    done = ("analyze", "report", "ablate", "sweep", "info", "recipes")
    assert {name: told[name][0] for name in done} == dict.fromkeys(done, 0)
    pages = {f"{name}/report.html" for name in ("analysis", "report", "ablation")}
    assert pages | {"sweep/sweep.csv"} <= set(told["files"])
    assert told["attention"] < 1e-5
    assert told["trained"]["implementation"] == "megasink"
    assert told["trained"]["difference"] < 1e-5
    assert told["trained"]["finite"]


def test_the_light_weight_looks_into_a_model_and_trains_it(tmp_path: Path):
    light = tmp_path / "light"
    environment.make(light, setup_arguments()["install_requires"])
    (light / "megasink").symlink_to(ROOT / "megasink")
    check(told_in(light, tmp_path / "session"))


def test_the_wheel_is_whole(tmp_path: Path):
    """As above, of a wheel that is built and installed: files that it lacks are missing here."""
    source, light = tmp_path / "source", tmp_path / "light"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "megasink", source / "megasink")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), "."]
    subprocess.run([*pip, *build], cwd=source, check=True, timeout=1200)
    (wheel,) = tmp_path.glob("megasink-*.whl")
    environment.make(light, setup_arguments()["install_requires"])
    install = ["install", "--no-deps", "--no-index", "--target", str(light), str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=1200)
    assert not (light / "megasink").is_symlink()
    check(told_in(light, tmp_path / "session"))


@pytest.mark.network
@pytest.mark.skipif(
    "MEGASINK_TEST_NETWORK" not in os.environ,
    reason="asks PyPI: set MEGASINK_TEST_NETWORK=1",
)
def test_macos_has_wheels_for_the_light_weight_and_none_for_training(tmp_path: Path):
    """Where the second half fails, the documentation may promise more."""
    names = setup_arguments()["install_requires"]
    found = environment.required(names, environment.MACOS)
    assert {"torch", "transformers", "huggingface-hub", "jinja2"} <= found.keys()
    assert not any(name.startswith(("nvidia", "cuda")) for name in found)
    done = for_macos([f"{name}=={each.version}" for name, each in found.items()], tmp_path)
    assert done.returncode == 0, done.stderr
    done = for_macos([f"megatron-core=={distribution('megatron-core').version}"], tmp_path)
    assert "No matching distribution found for megatron-core" in done.stderr


def for_macos(requirements: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """What pip says when it looks for wheels for macOS on arm64; it downloads at most metadata.

    Requirements are not followed: pip would evaluate their markers for this machine.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--quiet", "--no-deps", "--only-binary=:all:", "--target", str(folder)]
    command += ["--python-version=3.12", "--platform=macosx_14_0_arm64", *requirements]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)
