"""What `pip install megasink` gives without the extra "train", where megatron cannot be imported.

Not covered: other platforms than this one, except for whether their wheels exist (`network`).
"""

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from tests.light import environment
from tests.test_packaging import ROOT, requirements

SESSION = Path(__file__).with_name("session.py")


def told_in(light: Path, folder: Path) -> dict[str, Any]:
    """What session.py tells in an environment."""
    folder.mkdir()
    done = environment.run(light, "python", SESSION, folder)
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
    done = ("analyze", "report", "ablate", "sweep", "doctor", "recipes")
    assert {name: told[name][0] for name in done} == dict.fromkeys(done, 0)
    pages = {f"{name}/report.html" for name in ("analysis", "report", "ablation")}
    assert pages | {"sweep/sweep.csv"} <= set(told["files"])
    assert told["attention"] < 1e-5
    assert told["trained"]["implementation"] == "megasink"
    assert told["trained"]["difference"] < 1e-5
    assert told["trained"]["finite"]


def test_the_light_weight_looks_into_a_model_and_trains_it(tmp_path: Path):
    light = tmp_path / "light"
    packages = environment.make(light, requirements())
    (packages / "megasink").symlink_to(ROOT / "megasink")
    check(told_in(light, tmp_path / "session"))


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of the last commit, and the wheel made from that: `make dist`."""
    folder = tmp_path_factory.mktemp("distributions")
    clone = ["git", "clone", "--quiet", str(ROOT), str(folder / "source")]
    subprocess.run(clone, check=True, timeout=1200)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist")]
    subprocess.run([*build, str(folder / "source")], check=True, timeout=1200)
    return folder / "dist"


def installed(folder: Path, distributions: Path, requirements: list[str]) -> None:
    """Make an environment of the requirements with the wheel."""
    (wheel,) = distributions.glob("megasink-*.whl")
    environment.make(folder, requirements)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--quiet"]
    install = ["install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, "--disable-pip-version-check", *install], check=True, timeout=1200)


def test_the_wheel_is_whole(tmp_path: Path, distributions: Path):
    """As above, of the wheel: files that it lacks are missing here."""
    light = tmp_path / "light"
    installed(light, distributions, requirements())
    check(told_in(light, tmp_path / "session"))
    (source,) = distributions.glob("megasink-*.tar.gz")
    told = environment.run(light, "megasink", "--version").stdout
    assert told == f"megasink {source.name.removeprefix('megasink-').removesuffix('.tar.gz')}\n"
    assert source.stat().st_size < 20e6


def test_the_wheel_trains_looks_and_exports(tmp_path: Path, distributions: Path):
    """With megasink[train], outside of the checkout."""
    heavy = tmp_path / "heavy"
    installed(heavy, distributions, requirements() + requirements("train"))
    text = "".join(f"{n:b}, {n * n} and {n:x} are numbers\n" for n in range(999))
    (heavy / "text.txt").write_text(text)
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    model += "--max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm "
    model += "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    steps = "--micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-2 --eval-iters 0"
    for line in (
        "data text.txt --output data --train-tokenizer 330",
        "train --run-dir run --data-path data --tokenizer-model data-tokenizer "
        f"--split 1,0,0 {model}{steps}",
        "analyze run --output analysis --data text.txt",
        "convert-to-hf run --output exported",
    ):
        done = environment.run(heavy, "megasink", *line.split())
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    assert (heavy / "analysis" / "report.html").exists()
    assert (heavy / "exported" / "model.safetensors").exists()


@pytest.mark.network
@pytest.mark.skipif(
    "MEGASINK_TEST_NETWORK" not in os.environ,
    reason="asks PyPI: set MEGASINK_TEST_NETWORK=1",
)
def test_macos_has_wheels_for_the_light_weight_and_none_for_training(tmp_path: Path):
    """Where the second half fails, the documentation may promise more."""
    names = requirements()
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
