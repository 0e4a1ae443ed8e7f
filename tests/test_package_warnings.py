"""Warnings of Python are hidden, errors and native code are not, and a user may ask for all."""

import os
import subprocess
import sys

import pytest

from tests.documented import ROOT

PROGRAM = """
import logging, os, sys, warnings
from megasink import cli

def command(argv):
    warnings.warn("a warning")
    logging.getLogger("noisy").warning("a record")
    logging.getLogger("noisy").error("an error")
    os.write(2, b"of native code ")
    return 0

cli.main_of = lambda name: command
code = cli.main(["compare"])
logging.getLogger("noisy").warning("after it")
sys.exit(code)
"""
HIDDEN = ("UserWarning: a warning", "a record")


@pytest.mark.parametrize("asked", [{}, {"PYTHONWARNINGS": "default"}])
def test_warnings_are_shown_where_they_are_asked_for(asked):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | asked
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert [text for text in HIDDEN if text in done.stderr] == (list(HIDDEN) if asked else [])
    assert all(text in done.stderr for text in ("an error", "of native code", "after it"))
