"""A signal ends every command in one line, with its exit code, and nothing half-written is left."""

import os
import signal
import textwrap
import time
from pathlib import Path

import pytest

from megasink.console import signals
from tests import forkserver
from tests.forkserver import HANG_SECONDS, FreshProcess
from tests.waiting import handles, session, state, until

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
        [
            "megasink",
            "convert-from-hf",
            str(root / "llama"),
            "--output",
            str(root / "run"),
            "--no-verify",
        ]
    )
    assert done.returncode == 0, done.stderr
    return root


def commands(made: Path, out: Path) -> dict[str, tuple[list[str], str, str]]:
    """{command: (its arguments, a call in the middle of it, what is there then)}."""
    data = ["--data", str(made / "texts.txt"), "--seq-length", "64", "--device", "cpu"]
    prompt = ["--prompt", "Text", "--device", "cpu", "--max-new-tokens", "60"]
    long = ["--max-samples", "2000"]
    analysis, lengths = "megasink.analysis", ["--lengths", "16", "32"]
    return {
        "analyze": (
            [str(made / "llama"), *data, *long, "--output", str(out)],
            f"{analysis}.store:Store.write",
            "out/partial/*",
        ),
        "ablate": (
            [str(made / "llama"), *data, *long, "--output", str(out)],
            f"{analysis}.ablate.points:Ablation.measured",
            "out/.lock",
        ),
        "sweep": (
            [str(made / "llama"), *data[:2], *lengths, "--output", str(out)],
            f"{analysis}.sweep:measure",
            "out/.lock",
        ),
        "convert-to-hf": (
            [str(made / "run"), "--output", str(out), "--device", "cpu"],
            "megasink.convert.to_hf:_read",
            ".out.partial-*",
        ),
        "convert-from-hf": (
            [str(made / "llama"), "--output", str(out), "--device", "cpu"],
            "megasink.convert.from_hf:_read",
            ".out.partial-*",
        ),
        "generate": (
            [str(made / "run"), *prompt, *(["--prompt", "Text 2"] * 20)],
            "megasink.megatron.decoding:_Stage.step",
            "stderr",
        ),
        "data": (
            [str(made / "texts.txt"), "--output", str(out), "--train-tokenizer", "400"],
            "megasink.data.preprocess:_Files._add",
            "out.lock",
        ),
    }


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@pytest.mark.parametrize("command", commands(Path(), Path()))
def test_a_signal_is_one_line(nursery, made, tmp_path, command, number, phase):
    argv, call, sign = commands(made, tmp_path / "out")[command]
    stderr = tmp_path / "stderr"
    line = ["megasink", command, *argv]
    if phase == "middle":  # it stops itself there
        line = ["tests.waiting", "SIGSTOP", call, "1", command, *argv]
    process = nursery.start(line, stderr=stderr)

    def reached():
        assert process.poll() is None, stderr.read_text()
        if phase == "start":
            return handles(process.pid, signal.SIGTERM)
        return state(process.pid) == "T"

    until(reached)
    if phase == "start":
        time.sleep(0.05)  # anywhere: what comes first differs
    else:
        assert list(tmp_path.glob(sign)), stderr.read_text()
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    code = process.wait(HANG_SECONDS)
    said = stderr.read_text()
    assert code == CODES[number], said
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if "stopped by" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"megasink: stopped by {number.name}")
    # What the same command goes on from may stay, and is said.
    kept = "the same command " in lines[0] or "is complete: continue with" in lines[0]
    left = {path.name for path in tmp_path.rglob("*") if path.is_file() or path.name[0] == "."}
    assert not {n for n in left if n.startswith(".") or n.endswith(".lock")}, left
    assert kept or left <= {"stderr"}, (lines, left)
    until(lambda: not session(process.pid), lambda: session(process.pid))


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_signal_in_a_destructor(capsys, seconds):
    """Python would print the exception and go on."""

    class Archive:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    slept = []

    def command():
        Archive()
        time.sleep(seconds)
        slept.append(seconds)
        return 0

    assert signals.run(command) == 143
    assert 60 not in slept
    assert capsys.readouterr().err == "megasink: stopped by SIGTERM\n"


def test_a_second_signal_of_a_destructor_that_comes_late_is_nothing(capsys, monkeypatch):
    """It is sent a moment after the first, when the command may have ended."""

    class Archive:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    def slowly(raised):
        code = say(raised)
        time.sleep(0.1)  # ten times that moment
        return code

    before, say = signal.getsignal(signal.SIGTERM), signals._say_stopped
    monkeypatch.setattr(signals, "_say_stopped", slowly)
    assert signals.run(lambda: Archive() and 0) == 143
    assert capsys.readouterr().err == "megasink: stopped by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_second_signal_of_a_destructor_is_not_sent_after_the_command(monkeypatch):
    """A command may end by itself before it is sent, as --help does."""
    done = []

    class Timer:
        def __init__(self, *_):
            self.start, self.cancel, self.join = (
                lambda name=name: done.append(name) for name in ("start", "cancel", "join")
            )

    class Archive:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    def command():
        Archive()
        raise SystemExit(0)

    monkeypatch.setattr(signals.threading, "Timer", Timer)
    with pytest.raises(SystemExit):
        signals.run(command)
    assert done == ["start", "cancel", "join"]


def test_ctrl_c_while_python_starts(made, tmp_path):
    """Of a whole terminal: the workers say nothing either."""
    options = ["--train-tokenizer", "400", "--workers", "2"]
    for seconds in (0.0, 0.3, 1.0):
        argv = ["megasink", "data", str(made / "texts.txt"), *options]
        argv += ["--output", str(tmp_path / f"out-{seconds}")]  # it may have been quicker
        with (tmp_path / "stderr").open("wb") as stderr:
            process = FreshProcess(argv, stderr=stderr, start_new_session=True)
            until(lambda p=process: handles(p.pid, signal.SIGTERM))  # no program has it before
            time.sleep(seconds)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(HANG_SECONDS) in (0, 130), (tmp_path / "stderr").read_text()
        said = (tmp_path / "stderr").read_text()
        assert "Traceback" not in said, said
