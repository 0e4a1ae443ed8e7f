"""What the launcher works out by itself."""

import argparse
import dataclasses
import json
import shlex
import signal

import pytest

from megasink.cli import main
from megasink.errors import UserError
from megasink.options.command_parser import CommandParser
from megasink.options.dataclass_flags import escaped
from megasink.options.run_options import OPTIONS, add_options
from megasink.training import launch, preflight
from megasink.training.lease import Lease
from megasink.training.metrics_file import ACTS, RATIO, NewLines, weak_loss
from megasink.training.stop import FAILURES
from megasink.training.torchrun_processes import Ranks
from tests import runs
from tests.distributed.pool import free_port
from tests.parsing import read
from tests.training.command_lines import MOCK


@pytest.fixture
def accepted(monkeypatch):
    """Lines are parsed in this process, and not checked."""
    monkeypatch.setattr(preflight, "check", lambda lines: [read(line.flags) for line in lines])


def ranks(*flags, before=None):
    return preflight.ranks_to_start(read(["--device=cpu", *flags]), before)


def test_ranks_follow_the_layout():
    assert ranks() == 1
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size=3".split()
    assert ranks(*flags) == 6
    assert ranks(*flags, "--context-parallel-size=2") == 12


def test_resume_repeats_the_flags_of_the_last_start(tmp_path):
    commands = [
        ["x.py", "--run-dir", "r", "--num-layers", "1"],
        ["x.py", "--run-dir", "r", "--num-layers", "2", "--resume"],
    ]
    (tmp_path / "starts.jsonl").write_text(
        "".join(json.dumps({"command": c}) + "\n" for c in commands)
    )
    assert launch.flags_of_last_start(tmp_path) == ["--num-layers", "2"]
    assert launch.flags_of_last_start(tmp_path / "nothing") == []


def write_start(folder, command, **ranks):
    line = {"command": ["x.py", "--run-dir=r", *command], **ranks}
    (folder / "starts.jsonl").write_text(json.dumps(line) + "\n" + '{"command": ["cut')
    (folder / "metrics.jsonl").write_text('{"iteration": 1}\n')


def test_resume_auto_is_no_flag_of_the_last_start(tmp_path):
    write_start(tmp_path, ["--lr", "1", "--resume", "auto", "--seed", "2", "--resume=auto"])
    assert launch.flags_of_last_start(tmp_path) == ["--lr", "1", "--seed", "2"]
    # The same line once more does not grow.
    assert launch.flags_of_last_start(tmp_path, ["--lr", "1", "--seed", "2"]) == []
    assert launch.flags_of_last_start(tmp_path, ["--seed", "2"]) == ["--lr", "1"]
    assert launch.flags_of_last_start(tmp_path, ["--lr", "3"]) == ["--lr", "1", "--seed", "2"]
    (tmp_path / "metrics.jsonl").unlink()  # it failed at step 1: the corrected line stands alone
    assert launch.flags_of_last_start(tmp_path, ["--lr", "3"]) == []


def test_auto_says_from_where(tmp_path, monkeypatch, capsys, accepted):
    started = []
    monkeypatch.setattr(launch, "launch", lambda *given: started.append(given) or 0)
    assert (
        launch.main(["--run-dir", f"{tmp_path}/run", *MOCK, "--device=cpu", "--resume", "auto"])
        == 0
    )
    assert "no intact checkpoint, starting at step 0" in capsys.readouterr().out
    assert started == [([*MOCK, "--device=cpu", "--resume", "auto"], tmp_path / "run", 1, 4)]


@pytest.mark.parametrize("how", [["--resume"], ["--resume", "auto"]])
def test_a_resume_names_the_damaged_checkpoints_that_it_skips(
    tmp_path, monkeypatch, capsys, how, accepted
):
    monkeypatch.setattr(launch, "launch", lambda *_: 0)
    found = 30, {40: "a.distcp is missing"}
    monkeypatch.setattr(launch, "newest_intact", lambda *_, quick: found)
    write_start(tmp_path, MOCK)
    (tmp_path / "config.json").write_text('{"arguments": {}}')
    (tmp_path / "checkpoints" / "iter_0000030").mkdir(parents=True)
    line = ["--run-dir", str(tmp_path), *MOCK, "--device=cpu", *how, "--train-iters", "50"]
    assert launch.main(line) == 0
    said = "continuing from step 30; the checkpoint of step 40 is damaged: a.distcp is missing"
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "starts"),
    [(["--resume"], False), (["--resume", "auto"], False)]
    + [(["--resume", *more], True) for more in (["--train-iters", "5"], ["--skip-train"])],
)
def test_a_resume_of_a_finished_run_says_so_at_once(
    tmp_path, monkeypatch, capsys, flags, starts, accepted
):
    started = []
    monkeypatch.setattr(launch, "launch", lambda *given: started.append(given) or 0)
    monkeypatch.setattr(launch, "newest_intact", lambda *_, quick: (4, {}))
    write_start(tmp_path, MOCK)
    (tmp_path / "config.json").write_text('{"arguments": {}}')
    (tmp_path / "checkpoints" / "iter_0000004").mkdir(parents=True)
    assert launch.main(["--run-dir", str(tmp_path), *MOCK, "--device=cpu", *flags]) == 0
    said = capsys.readouterr().out
    assert ("has finished: step 4 of 4" in said, bool(started)) == (not starts, starts)
    if not starts:
        line = shlex.split(said.splitlines()[-1].partition(": megasink train ")[2])
        assert launch.main(line) == 0
        given = "--train-iters 8 --override-opt-param-scheduler --resume newest"
        assert started[0][0][-5:] == given.split()


def test_a_command_line_is_parsed_once_by_the_launcher_and_once_by_each_rank(
    pool, tmp_path, monkeypatch
):
    """The rank is given the launcher's words, in its environment."""
    parsed, started = [], []
    parse = argparse.ArgumentParser._parse_known_args
    monkeypatch.setattr(
        *(argparse.ArgumentParser, "_parse_known_args"),
        lambda self, *words: parsed.append(self.prog) or parse(self, *words),
    )
    monkeypatch.setattr(Ranks, "__enter__", lambda ranks: started.append(ranks) or ranks)
    monkeypatch.setattr(Ranks, "__exit__", lambda *_: None)
    monkeypatch.setattr(launch, "_follow", lambda *_: 0)
    line = [*runs.TINY, *runs.MOCK, "--device=cpu", "--train-iters=1", "--run-dir", f"{tmp_path}/r"]
    assert main(["train", *line]) == 0
    assert parsed == ["megasink train"]  # its own flags
    (ranks,) = started
    words = ranks._arguments[ranks._arguments.index("megasink.training") + 1 :]
    task = {"flags": words, "ranks": 1, "port": free_port(), "variables": dict(ranks._variables)}
    found, *_ = pool.run("tests.training.tasks:train_as_started", **task)
    assert found == (1, 0)
    # Another line, as of something that a rank starts.
    task["flags"] = [*words, "--log-interval", "1", "--resume"]
    found, *_ = pool.run("tests.training.tasks:train_as_started", **task | {"port": free_port()})
    assert found == (1, 1)


@pytest.mark.parametrize("named", [True, False])
def test_logs_of_a_refused_start_stay_where_the_message_names_them(tmp_path, monkeypatch, named):
    def failure(running, logs, run_dir, code):
        return UserError(f"rank 0 failed (log: {logs})" if named else "the flags are wrong")

    monkeypatch.setattr(Ranks, "__enter__", lambda ranks: ranks)
    monkeypatch.setattr(Ranks, "__exit__", lambda *_: None)
    monkeypatch.setattr(launch, "_follow", lambda *_: 1)
    monkeypatch.setattr(launch, "_failure", failure)
    with pytest.raises(UserError):
        launch.launch([], tmp_path / "run", 1, 4)
    assert (tmp_path / "run").exists() == named


def test_resume_asks_for_the_folder():
    for flags in (["--resume"], ["--resume", "auto"]):
        with pytest.raises(UserError, match="--resume needs --run-dir"):
            launch.main(["--device=cpu", *flags])


def test_resume_starts_as_many_ranks_as_the_run_had(tmp_path):
    assert launch.ranks_of_last_start(tmp_path) is None
    write_start(tmp_path, [], world_size=4, local_world_size=4)
    assert launch.ranks_of_last_start(tmp_path) == 4
    assert ranks(before=4) == 4
    assert ranks("--tensor-model-parallel-size", "2", before=4) == 4
    assert ranks("--tensor-model-parallel-size", "3", before=4) == 3
    write_start(tmp_path, [], world_size=4)  # of a version that did not write the other
    assert launch.ranks_of_last_start(tmp_path) == 4
    write_start(tmp_path, [], world_size=16, local_world_size=8)  # two nodes
    assert launch.ranks_of_last_start(tmp_path) is None


@pytest.mark.parametrize("flags", [[], ["--resume"], ["--resume", "auto"]])
def test_a_second_trainer_is_refused_before_it_starts(flags, tmp_path):
    first = Lease(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text('{"arguments": {}}')
    if flags != []:
        (tmp_path / "run" / "checkpoints" / "iter_0000002").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"is in use by another trainer \(process ") as error:
        launch.main(["--run-dir", str(tmp_path / "run"), "--device=cpu", *MOCK, *flags])
    assert len(str(error.value).splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before
    first.release()


def test_each_line_is_read_once_and_only_when_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    new_lines = NewLines(path)
    assert new_lines() == []
    path.write_text('{"iteration": 1}\n{"iterat')
    assert new_lines() == [{"iteration": 1}]
    with path.open("a") as file:
        file.write('ion": 2}\n')
    assert new_lines() == [{"iteration": 2}]
    assert NewLines(path)() == []


def test_a_line_that_a_kill_broke_is_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    new_lines = NewLines(path)
    path.write_text('{"iteration": 1}\n{"iterat{"iteration": 2}\n{"iteration": 3}\n')
    assert [line["iteration"] for line in new_lines()] == [1, 3]


def test_lines_after_the_steps_that_a_resume_drops_are_new(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"iteration": i}) + "\n" for i in range(1, 6)))
    new_lines = NewLines(path)
    path.write_text("".join(json.dumps({"iteration": i}) + "\n" for i in range(1, 3)))
    assert new_lines() == []
    with path.open("a") as file:
        file.write('{"iteration": 3}\n')
    assert new_lines() == [{"iteration": 3}]


def test_help_has_a_first_screen_and_the_parser_every_flag_of_ours(capsys):
    with pytest.raises(SystemExit) as stop:
        launch.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("example: megasink train ")
    assert "Default: sink." in text
    assert all(flag in text for flag in ("--ranks", "--help-all", "--head-balance-coeff"))
    parser = CommandParser(prog="train")
    add_options(parser)
    text = parser.format_help()
    for options in OPTIONS:
        for field in dataclasses.fields(options):
            assert f"  --{field.name.replace('_', '-')} " in text.replace("\n", " \n")


@pytest.mark.parametrize("text", ["50%", "100% of 5% d", "%)", "%(default)s of 3%", "%%", "5 %s"])
def test_a_help_text_may_hold_a_percent_sign(text):
    parser = argparse.ArgumentParser(prog="x")
    parser.add_argument("--a", default=7, help=escaped(text))
    shown = parser.format_help().replace("\n", " ")
    assert text.replace("%(default)s", "7").replace("%%", "%") in shown


def log(folder, rank, text):
    (folder / str(rank)).mkdir(parents=True)
    (folder / str(rank) / "stderr.log").write_text(text)


@pytest.mark.parametrize(
    ("failures", "log", "expected"),
    [
        ([(0, 1, 100), (3, -9, 103)], "", "rank 3 was killed by SIGKILL (out of memory?"),
        ([(0, -15, 100), (3, -11, 103)], "", "rank 3 was killed by SIGSEGV"),
        # torchrun kills ranks that do not end when another one has failed.
        ([(0, -9, 100), (3, 1, 103)], "Unable to shutdown process 100 via SIGTERM\n", None),
        ([(0, -15, 100), (3, 1, 103)], "", None),
        (None, "", None),
    ],
)
def test_the_rank_that_a_signal_ended_is_named(failures, log, expected, tmp_path):
    (tmp_path / "torchrun.log").write_text(log)
    if failures is not None:
        (tmp_path / FAILURES).write_text(json.dumps(failures))
    message = launch._killed(tmp_path)
    assert message is expected if expected is None else message.startswith(expected)


class Ended:
    """Ranks that have ended."""

    def __init__(self, *told):
        self.signals, self.pressed_again = list(told), told.count(signal.SIGINT) > 1


@pytest.mark.parametrize(
    ("told", "stderr", "code", "expected", "exit_code"),
    [
        ([], "", -9, "torchrun was killed by SIGKILL; no checkpoint was saved yet", None),
        ([15], "", 1, "stopped by SIGTERM; no checkpoint was saved yet", 143),
        ([2, 2], "", -9, "stopped by SIGINT twice; no checkpoint", 130),
        ([1], "megasink: error: no room\n", 1, "stopped by SIGHUP; no room", 129),
        ([], "megasink: stopped by SIGTERM after\n", 1, "stopped by SIGTERM (sent to a rank)", 143),
        ([], "megasink: error: no room\n", 1, "no room", None),
        (
            [],
            "x\nmegasink: error: 2 problems:\n  1. a\n  2. b\n",
            1,
            "2 problems:\n  1. a\n  2",
            None,
        ),
        ([], "fine\n", -3, "torchrun was killed by SIGQUIT", None),
        ([], "fine\n", 3, "the ranks ended with exit code 3; logs in ", None),
    ],
)
def test_why_ranks_ended_is_one_line(told, stderr, code, expected, exit_code, tmp_path):
    (tmp_path / "torchrun.log").write_text("")
    log(tmp_path, 0, stderr)
    failure = launch._failure(Ended(*told), tmp_path, tmp_path, code)
    assert str(failure).startswith(expected)
    assert getattr(failure, "exit_code", None) == exit_code


def test_a_traceback_is_its_last_line_and_where_to_go_on(tmp_path):
    """It counts more than what torchrun told the other ranks then."""
    (tmp_path / "torchrun.log").write_text("")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("40")
    log(tmp_path, 0, "megasink: stopped by SIGTERM while building the data sets\n")
    log(
        tmp_path, 1, "Traceback (most recent call last):\n  File x\n[rank1]: ValueError: 3 is odd\n"
    )
    message = str(launch._failure(Ended(), tmp_path, tmp_path, 1))
    assert message.startswith("rank 1 failed: ValueError: 3 is odd (log: ")
    assert "stderr.log); resume from step 40 with: megasink train --run-dir" in message


@pytest.mark.parametrize(
    ("coefficient", "ratios", "expected"),
    [
        (
            1e-4,
            [0.0, 2e-4, 2e-4, None],
            ["2.0e-04", "0.0001", "At --head-balance-coeff 0.01 it would be about 0.02 times"],
        ),
        (1e-2, [0.0, 2e-2, 1e-2], None),
        (1e-2, [ACTS, ACTS], None),
        (0.0, [], None),
        (0.0, [1e-5], None),  # of a start before, with a coefficient
        (1e-4, [None], None),
    ],
)
def test_a_loss_that_hardly_acted_is_named_at_the_end(tmp_path, coefficient, ratios, expected):
    path = tmp_path / "metrics.jsonl"
    assert weak_loss(path, coefficient) is None
    lines = [{"iteration": step, RATIO: ratio} for step, ratio in enumerate(ratios, 1)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"iteration": 9}]) + "{")
    note = weak_loss(path, coefficient)
    assert (note is None) == (expected is None)
    assert all(text in note for text in expected or ())
