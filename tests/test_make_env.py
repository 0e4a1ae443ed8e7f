"""tools/make_env.sh and make, on machines with other Pythons."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_packaging import ROOT, executable


def make_env(tmp_path: Path, pythons: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """tools/make_env.sh on a machine that has these programs and no other Python."""
    for name in ("bash", "dirname", "mkdir", "cp"):
        program = shutil.which(name)
        assert program is not None
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(program)
    for name, text in pythons.items():
        executable(tmp_path / name, text)
    return subprocess.run(
        [str(ROOT / "tools/make_env.sh"), str(tmp_path / "env")],
        env={"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1200,
    )


# Answers the script's own question like a Python that fits, and notes what else it is asked.
FITTING = """#!/bin/bash
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip") cp "$0" "$(dirname "$0")/uv"; echo "pip ${@:3}" ;;
  "pip install") echo "uv $@" ;;
esac
"""
WHOLE = ".[eval,finetune,gguf,muon,storage] --group dev"
UNFIT = "#!/bin/bash\nexit 1\n"


def test_make_env_says_what_is_missing(tmp_path: Path):
    done = make_env(tmp_path, {"bin/python3.12": UNFIT, "bin/python3": UNFIT})
    assert done.returncode == 1
    assert "needs Python 3.12 or 3.13" in done.stderr
    assert "none was found" in done.stderr
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize(
    "place",
    ["bin/python3.12", "bin/python3.13", "bin/python3", ".pyenv/versions/3.12.1/bin/python"],
)
def test_make_env_finds_python(tmp_path: Path, place: str):
    # A pyenv shim of a version that is not selected is on PATH, and fails.
    done = make_env(tmp_path, {"bin/python3.12": UNFIT} | {place: FITTING})
    assert done.returncode == 0, done.stderr
    asked = [line for line in done.stdout.splitlines() if line.startswith("uv pip install")]
    assert len(asked) == 1
    assert asked[0].endswith("--constraint constraints.txt --editable " + WHOLE)


def test_where_uv_fails_pip_installs_the_same(tmp_path: Path):
    no_uv = FITTING.replace('echo "uv $@"', "exit 1")
    done = make_env(tmp_path, {"bin/python3": no_uv})
    assert done.returncode == 0, done.stderr
    assert "uv failed" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("pip install --quiet --no-compile")
    assert done.stdout.splitlines()[-1].endswith(WHOLE)


def test_question_to_python_is_answered_by_this_one():
    """The stubs above stand for a Python; the real one must understand the same words."""
    text = (ROOT / "tools/make_env.sh").read_text()
    question = re.search(r"-c '(import ensurepip.+)'", text)
    assert question is not None
    assert subprocess.run([sys.executable, "-c", question[1]], timeout=1200).returncode == 0


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_installs_again_when_the_constraints_change(tmp_path: Path):
    def plan() -> str:
        command = ["make", "--dry-run", "--no-print-directory", f"VENV={tmp_path}", "test"]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=1200
        ).stdout

    assert "make_env.sh" in plan()
    stamp = tmp_path / ".ready"
    stamp.touch()
    assert "make_env.sh" not in plan()
    assert f"{tmp_path}/bin/python -m pytest" in plan()
    changed = (ROOT / "constraints.txt").stat().st_mtime
    os.utime(stamp, (changed - 1, changed - 1))
    assert "make_env.sh" in plan()
