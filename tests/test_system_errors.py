"""Failures of the machine are one line, whatever package reports them in whatever form."""

import errno
import os
import re
import subprocess
import sys

import pytest
import torch

from megasink.errors import UserError
from megasink.files.system_errors import explained, writes, writing


def raised(function):
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_write_names_the_file_the_room_and_the_cure(tmp_path, number):
    line = explained(OSError(number, os.strerror(number), str(tmp_path / "a")))
    assert line.startswith(f"{tmp_path}/a cannot be written: {os.strerror(number)} (")
    assert re.search(r"\([\d,.]+ MB free there\): \w", line)


def test_an_error_of_the_disk_is_read_or_written_by_its_operation(tmp_path):
    class Disk:
        def read(self):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def write(self, text):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    for operation, words in ((Disk().read, "read"), (lambda: Disk().write(""), "written")):
        error = raised(operation)
        assert explained(error, tmp_path).startswith(f"{tmp_path} cannot be {words}: Input/output")
        assert writes(error) == (words == "written")
        assert "dmesg" in explained(error)
        assert "free some" not in explained(error)


def test_no_memory_in_the_words_of_packages():
    for function in (
        lambda: torch.empty(1 << 60),
        lambda: bytearray(1 << 62),
        lambda: torch.empty(1 << 44, dtype=torch.float64).numpy().copy(),
    ):
        line = explained(raised(function))
        assert line.startswith("out of memory (")
        assert "GB are free" in line


def test_the_number_in_the_text_of_a_package():
    for text in (
        "I/O error: No space left on device (os error 28)",
        "Os { code: 28, kind: Other }",
    ):
        line = explained(RuntimeError(text), "model")
        assert line.startswith("model cannot be written: No space left on device")


def test_a_cause_counts_and_other_errors_stay(tmp_path):
    cause = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a.json")
    outer = RuntimeError("cannot load")
    outer.__cause__ = cause
    assert "a.json cannot be opened: Too many open files (" in explained(outer)
    for error in (KeyError(28), ValueError("12 values"), FileNotFoundError(2, "No such file", "b")):
        assert explained(error) is None
    with pytest.raises(KeyError), writing("a"):
        raise KeyError(28)
    with (
        pytest.raises(UserError, match="--output a cannot be written: Permission"),
        writing("--output a"),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", "a")


@pytest.mark.parametrize("words", [["recipes"], ["--help"], ["train", "--help"]])
def test_an_output_that_is_full_or_closed(words):
    line = [sys.executable, "-W", "ignore", "-m", "megasink", *words]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "the output cannot be written: No space left on device" in done.stderr
    receiving, sending = os.pipe()
    os.close(receiving)
    done = subprocess.run(line, stdout=sending, stderr=subprocess.PIPE, text=True, check=False)
    os.close(sending)
    assert (done.returncode, done.stderr) == (141, "")
