"""Messages of other packages reach a log and not the terminal; everything else reaches it."""

import os
import re
import subprocess
import sys

import pytest

from tests.documented import ROOT

# A command that uses an installed package, as far as file names tell.
PROGRAM = """
import logging, os, sys, sysconfig, warnings
from megasink import cli

def package(code):
    exec(compile(code, sysconfig.get_path("purelib") + "/noisy.py", "exec"), {})

def command(argv):
    package("import warnings; warnings.warn('of a package')")
    warnings.warn("of the user")
    package(
        "import logging; logger = logging.getLogger('noisy'); logger.propagate = False\\n"
        "logger.addHandler(logging.StreamHandler())\\n"
        "logger.info('information'); logger.warning('a record'); logger.error('an error')"
    )
    logging.getLogger("mine").warning("a record of the user")
    os.write(2, b"of native code\\\\n")
    if argv:
        raise RuntimeError("broken")
    return 0

cli.main_of = lambda name: command
sys.exit(cli.main(["compare", *sys.argv[1:]]))
""".replace("\\\\n", "\\n")
SHOWN = ("UserWarning: of the user", "an error", "a record of the user", "of native code")
LOGGED = ("UserWarning: of a package", "WARNING:noisy:a record")


def said(folder, state, *arguments):
    """What a user sees of the command, and its exit code."""
    script = folder / "script.py"
    script.write_text(PROGRAM)
    environment = os.environ | {"XDG_STATE_HOME": str(state), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not done.stdout
    return done.stderr, done.returncode


def test_a_package_is_heard_in_the_log_and_the_user_on_the_terminal(tmp_path):
    log = tmp_path / "state" / "megasink" / "compare.log"
    for times in (1, 2):
        text, code = said(tmp_path, tmp_path / "state")
        assert code == 0
        assert [part for part in (*SHOWN, *LOGGED) if part in text] == list(SHOWN)
        assert "messages of other packages" not in text
        written = log.read_text()
        assert [written.count(part) for part in (*LOGGED, *SHOWN, "information")] == [
            *(times, times),
            *(0, 0, 0, 0, 0),
        ]


def test_a_crash_shows_its_cause(tmp_path):
    text, code = said(tmp_path, tmp_path / "state", "now")
    assert code == 1
    assert re.search(r"Traceback.*\nRuntimeError: broken\n$", text, re.S)
    log = tmp_path / "state" / "megasink" / "compare.log"
    assert f"megasink: 2 messages of other packages: {log}\n" in text
    assert all(part in text for part in SHOWN)


def test_nothing_is_lost_where_no_log_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    text, code = said(tmp_path, tmp_path / "file")
    assert code == 0
    assert all(part in text for part in (*SHOWN, "UserWarning: of a package", "a record"))
    assert "messages of other packages" not in text


@pytest.mark.parametrize("size", [10, 2 << 20])
def test_a_log_does_not_grow_for_ever(tmp_path, monkeypatch, size):
    from megasink import messages

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    log = messages.log_of("plot")
    log.parent.mkdir()
    log.write_text("x" * size)
    assert messages._Log(log, None).write("new")
    assert (log.stat().st_size > size) == (size == 10)
