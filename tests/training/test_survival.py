"""Kills, signals, full disks: training goes on from the newest whole checkpoint, to the bit.

Done to real processes and real files; compared by metrics.jsonl with a run that never stopped.
"""

import os
import shutil
import signal

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from megasink.checkpoints.damage import iterations, newest_intact
from megasink.training.lease import Lease
from tests import runs
from tests.distributed.pool import free_port
from tests.forkserver import server
from tests.training.six_steps import FLAGS, losses, only_line, resumed_from


@pytest.mark.parametrize(("moment", "newest"), [("step:5", 4), ("save:2", 2)])
def test_a_killed_run_goes_on_to_the_bit(dying, train, finished, tmp_path, moment, newest):
    run = tmp_path / "run"
    code, _ = dying(moment, run)
    assert code == -signal.SIGKILL
    # What a run writes to TensorBoard that is killed later.
    with SummaryWriter(str(run / "tensorboard")) as writer:
        for step in range(1, 7):
            writer.add_scalar("lm loss", -1.0, step)
    # TensorBoard reads files in the order of their names, which have the second of their start;
    # forked, the start after it may lie in the same one.
    for path in (run / "tensorboard").iterdir():
        path.rename(path.with_name(path.name.replace("tfevents.", "tfevents.0")))
    train(run, "--resume")
    assert resumed_from(run) == newest
    assert losses(run) == losses(finished)
    events = EventAccumulator(str(run / "tensorboard")).Reload().Scalars("lm loss")
    again = [event for event in events if event.step > newest]
    assert [event.step for event in again] == list(range(newest + 1, 7))
    assert min(event.value for event in again) > 0
    # What the kill left unfinished is still there, out of the way.
    aside = [path.name for path in (run / "checkpoints").glob("*.damaged")]
    assert aside == ([] if newest == 4 else ["iter_0000004.damaged"])


def test_a_kill_while_a_checkpoint_is_written_in_the_background(dying, train, finished, tmp_path):
    """The checkpoint of step 2 was written while step 3 changed the weights: it is that of step 2.

    Those of 4 (written, not finished) and 6 are not used.
    """
    run = tmp_path / "run"
    code, text = dying("async:3", run, "--async-save")
    assert code == -signal.SIGKILL, text
    train(run, "--resume", "--async-save")
    assert resumed_from(run) == 2
    assert losses(run) == losses(finished)
    aside = sorted(path.name for path in (run / "checkpoints").glob("*.damaged"))
    assert aside == ["iter_0000004.damaged", "iter_0000006.damaged"]
    assert newest_intact(run / "checkpoints", checksums=True) == (6, {})


def test_sigterm_in_a_checkpoint_saves_one_more_and_ends(dying, train, finished, tmp_path):
    """Sent to everything that the rank started, as torchrun and schedulers do."""
    run = tmp_path / "run"
    code, text = dying("term:2", run, "--async-save")
    assert code == 128 + signal.SIGTERM, text
    assert only_line(text).startswith("megasink: stopped by SIGTERM after step 5, which is saved; ")
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Images("head importance")] == [1, 5]
    assert iterations(run / "checkpoints") == [2, 4, 5]
    assert newest_intact(run / "checkpoints", checksums=True) == (5, {})
    train(run, "--resume")
    assert losses(run) == losses(finished)


def test_a_dead_writer_ends_the_rank_in_one_line(dying, tmp_path):
    run = tmp_path / "run"
    code, text = dying("writer:2", run, "--async-save")
    assert code == 2, text
    (error,) = [line for line in text.splitlines() if line.startswith("megasink: error")]
    assert "the checkpoint writer of rank 0" in error
    assert newest_intact(run / "checkpoints")[0] == 2


def test_nan_keeps_the_newest_checkpoint(dying, train, finished, tmp_path):
    """Step 5 after the checkpoint of step 4, which Megatron would write once more."""
    run = tmp_path / "run"
    code, text = dying("nan:5", run)
    assert code == 2, text
    (error,) = [line for line in text.splitlines() if line.startswith("megasink: error")]
    assert "step 5: NaN or Inf in the loss" in error
    assert "keeping the intact checkpoint of step 4" in run.with_suffix(".stdout").read_text()
    assert newest_intact(run / "checkpoints", checksums=True) == (4, {})
    train(run, "--resume")
    assert resumed_from(run) == 4
    assert losses(run) == losses(finished)


def test_a_full_disk_ends_in_one_line_and_loses_no_checkpoint(dying, train, finished, tmp_path):
    run = tmp_path / "run"
    code, text = dying("full:2", run)
    assert code == 2, text
    (error,) = [line for line in text.splitlines() if line.startswith("megasink: error")]
    assert "a checkpoint could not be written" in error
    assert "GB free" in error
    assert "the checkpoint of step 2 is intact: free some space and use --resume" in error
    train(run, "--resume")
    assert resumed_from(run) == 2
    assert losses(run) == losses(finished)


@pytest.mark.parametrize(
    ("moment", "number", "saved", "words"),
    [
        ("SIGHUP@build_train_valid_test_data_iterators:1", signal.SIGHUP, [], "while building the"),
        ("SIGINT@train_step:1", signal.SIGINT, [1], "after step 1, which is saved"),
        ("SIGUSR1@train_step:2", signal.SIGUSR1, [2], "after step 2, which is saved"),
        ("SIGTERM@evaluate:1", signal.SIGTERM, [2, 3], "after step 3, which is saved"),
        ("SIGINT@evaluate:3", signal.SIGINT, [2, 4, 6], "while evaluating"),
    ],
)
def test_a_signal_ends_every_phase_in_one_line(dying, tmp_path, moment, number, saved, words):
    """At once where there is nothing to save, else after the step and a checkpoint."""
    run = tmp_path / "run"
    code, text = dying(moment, run, "--eval-interval", "3")
    assert code == 128 + number, text
    line = only_line(text)
    assert line.startswith(f"megasink: stopped by {signal.Signals(number).name} ")
    assert words in line
    assert iterations(run / "checkpoints") == saved
    assert (f"resume from step {saved[-1]} with: " if saved else "no checkpoint was") in line


@pytest.mark.parametrize(
    ("moment", "name", "left"),
    [
        ("metrics:4", "metrics.jsonl", "the checkpoint of step 2 is intact: free some space"),
        ("board:9", "tensorboard", "there is no intact checkpoint yet: free"),  # in step 1
    ],
)
def test_a_full_disk_under_metrics_ends_in_one_line(dying, tmp_path, moment, name, left):
    run = tmp_path / "run"
    code, text = dying(moment, run, "--tensorboard-queue-size", "1")
    assert code == 2, text
    # TensorBoard's thread may have said before that a file cannot be written.
    (line,) = [line for line in text.splitlines() if line.startswith("megasink: error: ")]
    assert f"{name} could not be written (" in line
    assert f"GB free there): No space left on device; {left}" in line


@pytest.mark.parametrize("moment", ["step:2", "save:1"])
def test_resume_auto_starts_again_where_no_checkpoint_is_whole(
    dying, train, finished, tmp_path, moment
):
    """The line that a scheduler gives once more: the first time there is no folder yet."""
    run = tmp_path / "run"
    code, text = dying(moment, run, "--resume", "auto")
    assert code == -signal.SIGKILL, text
    assert "starting at step 0" in run.with_suffix(".stdout").read_text()
    assert (run / "lease" / "owner.json").is_file()  # of a process that is gone
    before = (run / "metrics.jsonl").read_text().splitlines()
    assert len(before) == (1 if moment == "step:2" else 2)
    with pytest.raises(Exception, match=r"no (finished )?checkpoint.*--resume auto to start"):
        train(run, "--resume")
    train(run, "--resume", "auto")
    assert resumed_from(run) is None
    assert losses(run) == losses(finished)
    aside = [path.name for path in (run / "checkpoints").glob("*.damaged")]
    assert aside == ([] if moment == "step:2" else ["iter_0000002.damaged"])
    assert newest_intact(run / "checkpoints", checksums=True) == (6, {})
    assert not (run / "lease" / "owner.json").exists()


def test_torchrun_starts_the_ranks_again_and_they_go_on(pool, tmp_path):
    """--max-restarts: a rank that kills itself is followed by others, by the same command line."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    command = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command += [
        "--max-restarts=1",
        "--monitor-interval=0.2",
        "-m",
        "tests.training.restarting_entry",
    ]
    done = server().run([*command, *FLAGS, "--run-dir", str(run), "--resume", "auto"], tree=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    pool.train([*FLAGS, "--run-dir", str(whole)], 2)
    assert runs.resumed_from(run) == [None, 4]
    assert losses(run) == losses(whole)
    assert not (run / "lease" / "owner.json").exists()


def test_every_rank_of_a_second_trainer_is_refused(pool, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    first = Lease(run)
    longer = ["--train-iters", "9", "--override-opt-param-scheduler"]
    with pytest.raises(Exception, match="failed on 2 of 2 ranks") as refused:
        pool.train([*FLAGS, "--run-dir", str(run), "--resume", *longer], 2)
    assert str(refused.value).count(f"in use by another trainer (process {os.getpid()} on ") == 2
    first.release()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
