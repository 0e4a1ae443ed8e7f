"""Launch scripts are followed as bash runs them; what bash would have to run stays open."""

import re
import subprocess
from itertools import takewhile
from pathlib import Path

import pytest

from megasink.errors import UserError
from megasink.plan import launch_script

HERE = Path(__file__).parent
# torchrun shows its words after the program; the first call counts.
STUB = """torchrun() { shift; printf '%s\\0' "$@" END; }; export -f torchrun; . "$0" """


def cases(name: str):
    parts = re.split(r"^### (\w+)\n", (HERE / name).read_text(), flags=re.M)[1:]
    return [pytest.param(text, id=name) for name, text in zip(parts[::2], parts[1::2], strict=True)]


@pytest.mark.parametrize("text", cases("equal_to_bash.txt"))
def test_a_script_has_the_flags_that_bash_passes(tmp_path, text):
    path = tmp_path / "train.sh"
    path.write_text(text)
    run = subprocess.run(
        ["env", "-i", "PATH=/usr/bin:/bin", "bash", "-c", STUB, path],
        cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    words = [
        *takewhile(lambda word: word != "END", run.stdout[run.stdout.find("--") :].split("\0"))
    ]
    assert words, run.stderr
    assert launch_script.read(path, {}, ()).flags == words


@pytest.mark.parametrize("text", cases("open_scripts.txt"))
def test_a_value_that_depends_on_a_command_is_refused(tmp_path, text):
    path = tmp_path / "train.sh"
    path.write_text(text)
    with pytest.raises(UserError, match=r"no value for .*--num-layers"):
        launch_script.read(path, {}, ())
