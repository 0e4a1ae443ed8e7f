"""A signal ends every command in one line, with its exit code, and nothing half-written is left."""

import os
import re
import signal
import textwrap
import time
from pathlib import Path

import pytest

from megasink import stopping
from tests import forkserver
from tests.forkserver import FreshProcess

TEXTS = [f"Text {i}: nothing in it stands twice, {'again ' * i}and it ends." for i in range(40)]
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}
PHASES = ("start", "middle")


@pytest.fixture(scope="module")
def nursery():
    nursery = forkserver.nested()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def made(nursery, tmp_path_factory):
    """A Hugging Face folder, a run that was imported from it, and texts."""
    from tests.analysis.capture.tiny_models import save_with_tokenizer

    root = tmp_path_factory.mktemp("made")
    save_with_tokenizer(root, "llama", TEXTS, 330)
    source = textwrap.dedent(Path(textwrap.__file__).read_text()) * 40
    (root / "texts.txt").write_text(source)
    done = nursery.run(
        ["megasink", "convert-from-hf", str(root / "llama"), str(root / "run"), "--no-verify"]
    )
    assert done.returncode == 0, done.stderr
    return root


def commands(made: Path, out: Path) -> dict[str, tuple[list[str], str]]:
    """{command: (its arguments, what is there in the middle of it)}."""
    data = ["--data", str(made / "texts.txt"), "--seq-length", "64", "--device", "cpu"]
    prompt = ["--prompt", "Text", "--cpu", "--max-new-tokens", "60"]
    long = ["--max-samples", "2000"]
    return {
        "analyze": ([str(made / "llama"), *data, *long, "--output", str(out)], "out/partial/*"),
        "ablate": (
            [str(made / "llama"), *data, *long, "--output", str(out)],
            "out/.lock",
        ),
        "sweep": (
            [str(made / "llama"), *data[:2], "--lengths", "16", "32", "--output", str(out)],
            "out/.lock",
        ),
        "convert-to-hf": ([str(made / "run"), str(out), "--cpu"], ".out.partial-*"),
        "convert-from-hf": ([str(made / "llama"), str(out), "--cpu"], ".out.partial-*"),
        "generate": ([str(made / "run"), *prompt, *(["--prompt", "Text 2"] * 20)], "stderr"),
        "data": (
            [str(made / "texts.txt"), "--output", str(out), "--train-tokenizer", "400"],
            "out.lock",
        ),
    }


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@pytest.mark.parametrize("command", commands(Path(), Path()))
def test_a_signal_is_one_line(nursery, made, tmp_path, command, number, phase):
    argv, sign = commands(made, tmp_path / "out")[command]
    stderr = tmp_path / "stderr"
    process = nursery.start(["megasink", command, *argv], stderr=stderr)
    while not handles(process.pid, signal.SIGTERM):
        assert process.poll() is None, stderr.read_text()
        time.sleep(0.001)
    if phase == "start":
        time.sleep(0.05)
    else:
        deadline = time.monotonic() + 600  # a hang
        while not any(path.stat().st_size or phase for path in tmp_path.glob(sign)):
            assert process.poll() is None, stderr.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
    process.send_signal(number)
    code = process.wait(120)
    said = stderr.read_text()
    assert code == CODES[number], said
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if "stopped by" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"megasink: stopped by {number.name}")
    # What the same command goes on from may stay, and is said.
    kept = "the same command goes on" in lines[0] or "is whole: go on with" in lines[0]
    left = {path.name for path in tmp_path.rglob("*") if path.is_file() or path.name[0] == "."}
    assert not {n for n in left if n.startswith(".") or n.endswith(".lock")}, left
    assert kept or left <= {"stderr"}, (lines, left)
    assert not [p for p in nursery.left() if p.pid != process.pid and p.ppid() == process.pid]


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_signal_in_a_destructor(capsys, seconds):
    """Python would print the exception and go on."""

    class Archive:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    def command():
        Archive()
        time.sleep(seconds)
        return 0

    begin = time.monotonic()
    assert stopping.run(command) == 143
    assert time.monotonic() - begin < 9  # by itself, not by the watch
    assert capsys.readouterr().err == "megasink: stopped by SIGTERM\n"


def test_ctrl_c_while_python_starts(made, tmp_path):
    """Of a whole terminal: the workers say nothing either."""
    options = ["--train-tokenizer", "400", "--workers", "2"]
    for seconds in (0.0, 0.3, 1.0):
        argv = ["megasink", "data", str(made / "texts.txt"), *options]
        argv += ["--output", str(tmp_path / f"out-{seconds}")]  # it may have been quicker
        with (tmp_path / "stderr").open("wb") as stderr:
            process = FreshProcess(argv, stderr=stderr, start_new_session=True)
            while not handles(process.pid, signal.SIGTERM):  # no program has a handler before
                time.sleep(0.001)
            time.sleep(seconds)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(120) in (0, 130), (tmp_path / "stderr").read_text()
        said = (tmp_path / "stderr").read_text()
        assert "Traceback" not in said, said


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    (line,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(line, 16) >> (number - 1) & 1)
