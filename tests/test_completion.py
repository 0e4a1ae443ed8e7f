"""Tab in bash: the functions that users get from argcomplete, with the words that bash gives."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megasink.cli import COMMANDS
from tests.documented import ROOT
from tests.test_startup import SLOW

# `megasink` as installed, which also tells what it has imported.
ENTRY = f"""#!{sys.executable}
import os, sys
from megasink.cli import main
end = os._exit
def ended(code):
    open(os.environ["IMPORTED"], "a").write(" ".join(set({SLOW.split()!r}) & set(sys.modules)))
    end(code)
os._exit = ended
sys.exit(main())
"""
SCRIPT = """
eval "$(register-python-argcomplete megasink)"
for line in "$@"; do
  read -ra COMP_WORDS <<< "$line"
  [[ $line == *' ' ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=9
  COMPREPLY=()
  _python_argcomplete megasink "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
  echo "> ${COMPREPLY[*]}"
done
"""


@pytest.fixture
def tab(tmp_path):
    """Return the completions of several lines, one list each."""
    entry = tmp_path / "bin" / "megasink"
    entry.parent.mkdir()
    entry.write_text(ENTRY)
    entry.chmod(0o755)
    path = [str(entry.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(ROOT),
        "IMPORTED": str(tmp_path / "imported"),
    }

    def completed(*lines):
        (tmp_path / "folder").mkdir(exist_ok=True)
        done = subprocess.run(
            ["bash", "--norc", "-c", SCRIPT, "bash", *lines],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
        assert (done.returncode, done.stderr) == (0, "")
        # A Tab must be quick: nothing slow is imported.
        assert (tmp_path / "imported").read_text() == ""
        return [line[1:].split() for line in done.stdout.splitlines()]

    return completed


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_flags_and_choices(tab):
    commands, some, flags, choices, of_megatron, none, of_both = tab(
        "megasink ",
        "megasink conv",
        "megasink analyze --max-s",
        "megasink train --attention-variant v",
        "megasink train --tensor-mod",
        "megasink trian --",
        "megasink finetune --share",
    )
    assert sorted(commands) == sorted(COMMANDS)
    assert sorted(some) == ["convert-from-hf", "convert-to-hf"]
    assert flags == ["--max-samples"]
    assert sorted(choices) == ["v-bias", "vanilla"]
    assert of_megatron == ["--tensor-model-parallel-size"]
    assert none == []
    assert of_both == ["--shared-heads"]
