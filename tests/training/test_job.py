"""The process that checks command lines: its failures are one line and an exit code."""

import resource
import subprocess
import sys
import tempfile

import pytest

from megasink.errors import UserError
from megasink.training import preflight


@pytest.mark.parametrize(
    ("code", "error"), [(3, pytest.raises(SystemExit)), (-9, pytest.raises(UserError))]
)
def test_a_failed_check_ends_the_command(monkeypatch, code, error):
    monkeypatch.setattr(preflight, "start", lambda _: code)
    with error as caught:
        preflight.check([preflight.Line(["--device", "cpu"])])
    assert "3" in str(caught.value) if code > 0 else "signal 9" in str(caught.value)


def test_an_answer_that_cannot_be_written_is_one_line():
    limit = (resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    with tempfile.TemporaryFile("w+") as file:
        file.write("[]")
        file.seek(0)
        done = subprocess.run(
            [sys.executable, "-m", "megasink.training.preflight"],
            stdin=file,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(*limit),
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "File too large" in done.stderr
