"""Kills, full disks, damaged files: training goes on from the newest whole checkpoint, to the bit.

Done to real processes and real files; compared by metrics.jsonl with a run that never stopped.
"""

import contextlib
import json
import os
import random
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megasink.checkpoint.intact import damage, iterations, newest_intact
from megasink.train.lease import Lease
from tests.distributed.pool import ROOT
from tests.distributed.test_resume import free_port

FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 6
    --lr 1e-3 --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --tokenizer-type NullTokenizer --vocab-size 255 --mock-data --eval-iters 1
    --eval-interval 100 --log-interval 1 --save-interval 2 --head-balance-coeff 0.1
    --num-workers 0
""")


@pytest.fixture(scope="module")
def train(pool):
    """Run the trainer to its end in a worker."""

    def run(folder, *flags):
        pool.run(
            "tests.distributed.launch_task:train",
            timeout=300,
            flags=[*FLAGS, "--run-dir", str(folder), *flags],
            ranks=1,
            port=free_port(),
        )

    return run


@pytest.fixture(scope="module")
def finished(train, tmp_path_factory):
    """A run that never stopped: checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(folder)
    return folder


@pytest.fixture(scope="module")
def dying():
    """Train in a process of its own that dies: its exit code and what it said.

    Nothing that it started may be left a few seconds later.
    """
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    entry = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.train.dying_entry"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def run(moment, folder, *flags):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        environment = {name: str(value) for name, value in (numbers | address).items()}
        said, errors = folder.with_suffix(".stdout"), folder.with_suffix(".stderr")
        request = {"moment": moment, "flags": [*FLAGS, "--run-dir", str(folder), *flags]}
        request |= {"environment": environment, "stdout": str(said), "stderr": str(errors)}
        entry.stdin.write(json.dumps(request) + "\n")
        entry.stdin.flush()
        leader = answer()
        assert leader > 1
        try:
            code = answer()
            deadline = time.monotonic() + 10
            while left := session(leader):
                assert time.monotonic() < deadline, f"still there: {left}"
                time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
        return code, errors.read_text()

    def answer():
        assert select.select([entry.stdout], [], [], 200)[0], "no answer"
        return int(entry.stdout.readline())

    yield run
    entry.kill()
    entry.wait()


def session(leader):
    """Command lines of what a process started, itself left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if process.pid != leader and os.getsid(process.pid) == leader:
                found.append(" ".join(process.cmdline()))
    return found


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "lm_loss" in line]
    assert [line["iteration"] for line in steps] == [1, 2, 3, 4, 5, 6]
    return [(line["lm_loss"], line["balance_loss"], line["grad_norm"]) for line in steps]


def only_line(text):
    (line,) = [line for line in text.splitlines() if line.startswith("megasink: ")]
    return line


def resumed_from(folder):
    return json.loads((folder / "starts.jsonl").read_text().splitlines()[-1])["resumed_from"]


@pytest.mark.parametrize(("moment", "newest"), [("step:5", 4), ("save:2", 2)])
def test_a_killed_run_goes_on_to_the_bit(dying, train, finished, tmp_path, moment, newest):
    run = tmp_path / "run"
    code, _ = dying(moment, run)
    assert code == -signal.SIGKILL
    train(run, "--resume")
    assert resumed_from(run) == newest
    assert losses(run) == losses(finished)
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
    assert "the checkpoint of step 4 is whole: kept" in run.with_suffix(".stdout").read_text()
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
    assert "the checkpoint of step 2 is whole: make room and use --resume" in error
    train(run, "--resume")
    assert resumed_from(run) == 2
    assert losses(run) == losses(finished)


@pytest.mark.parametrize(
    ("moment", "number", "saved", "words"),
    [
        ("SIGHUP@build_train_valid_test_data_iterators:1", signal.SIGHUP, [], "while building the"),
        ("SIGINT@train_step:1", signal.SIGINT, [1], "after step 1, which is saved"),
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
    assert (f"go on from step {saved[-1]} with: " if saved else "no checkpoint was") in line


@pytest.mark.parametrize(
    ("moment", "name", "left"),
    [
        ("metrics:4", "metrics.jsonl", "the checkpoint of step 2 is whole: make room"),
        ("board:9", "tensorboard", "there is no whole checkpoint yet: make room"),  # in step 1
    ],
)
def test_a_full_disk_under_metrics_ends_in_one_line(dying, tmp_path, moment, name, left):
    run = tmp_path / "run"
    code, text = dying(moment, run, "--tensorboard-queue-size", "1")
    assert code == 2, text
    line = only_line(text)
    assert f"{name} could not be written (" in line
    assert f"GB free there): No space left on device; {left}" in line


@pytest.mark.parametrize("harm", ["truncated shard", "missing shard", "flipped bit", "no index"])
def test_a_damaged_checkpoint_is_passed_over(train, finished, tmp_path, harm):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    newest = run / "checkpoints" / "iter_0000006"
    shard = newest / "__0_0.distcp"
    content = shard.read_bytes()
    if harm == "truncated shard":
        shard.write_bytes(content[: len(content) // 2])
    elif harm == "missing shard":
        shard.unlink()
    elif harm == "no index":
        (newest / ".metadata").write_bytes((newest / ".metadata").read_bytes()[:100])
    else:
        shard.write_bytes(_flipped(content, 0.5))
    before = losses(run)
    flags = ["--verify-checkpoint"] if harm == "flipped bit" else []
    if harm in ("truncated shard", "flipped bit"):  # the others differ in the reason alone
        train(run, "--resume", *flags)
        assert resumed_from(run) == 4
        assert losses(run) == before
        assert (run / "checkpoints" / "iter_0000006.damaged").is_dir()
    else:
        assert newest_intact(run / "checkpoints")[0] == 4


def test_every_flipped_bit_in_a_tensor_is_found(finished, tmp_path):
    checkpoint = tmp_path / "iter_0000006"
    shutil.copytree(finished / "checkpoints" / "iter_0000006", checkpoint)
    assert damage(checkpoint, checksums=True) is None
    shard = checkpoint / "__0_0.distcp"
    content = shard.read_bytes()
    generator = random.Random(0)
    found = 0
    for _ in range(20):
        shard.write_bytes(_flipped(content, generator.random()))
        found += damage(checkpoint, checksums=True) is not None
    # The zip format pads between its records: a bit there belongs to no tensor.
    assert found >= 18


def test_no_whole_checkpoint_is_said(train, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for index in run.glob("checkpoints/*/.metadata"):
        index.unlink()
    with pytest.raises(Exception, match=r"no checkpoint in .* is whole \(step 6: .*step 2: "):
        train(run, "--resume")
    assert len(list(run.glob("checkpoints/iter_*"))) == 3  # nothing was moved


def _flipped(content: bytes, where: float) -> bytes:
    changed = bytearray(content)
    changed[int(where * len(content))] ^= 0x10
    return bytes(changed)


@pytest.mark.parametrize("moment", ["step:2", "save:1"])
def test_resume_auto_starts_again_where_no_checkpoint_is_whole(
    dying, train, finished, tmp_path, moment
):
    """The line that a scheduler gives once more: the first time there is no folder yet."""
    run = tmp_path / "run"
    code, text = dying(moment, run, "--resume", "auto")
    assert code == -signal.SIGKILL, text
    assert "starting at step 0" in run.with_suffix(".stdout").read_text()
    assert (run / "lease.json").is_file()  # of a process that is gone
    before = (run / "metrics.jsonl").read_text().splitlines()
    assert len(before) == (1 if moment == "step:2" else 2)
    with pytest.raises(Exception, match=r"no (finished )?checkpoint.*--resume auto starts"):
        train(run, "--resume")
    train(run, "--resume", "auto")
    assert resumed_from(run) is None
    assert losses(run) == losses(finished)
    aside = [path.name for path in (run / "checkpoints").glob("*.damaged")]
    assert aside == ([] if moment == "step:2" else ["iter_0000002.damaged"])
    assert newest_intact(run / "checkpoints", checksums=True) == (6, {})
    assert not (run / "lease.json").exists()


def test_resume_auto_goes_on_from_the_newest_whole_checkpoint(dying, train, finished, tmp_path):
    run = tmp_path / "run"
    code, text = dying("save:2", run, "--resume", "auto")
    assert code == -signal.SIGKILL, text
    train(run, "--resume", "auto")
    assert resumed_from(run) == 2
    assert losses(run) == losses(finished)


@pytest.mark.slow
def test_torchrun_starts_the_ranks_again_and_they_go_on(pool, tmp_path):
    """--max-restarts: a rank that kills itself is followed by others, by the same command line."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [f"--master-port={free_port()}", "--max-restarts=1", "--monitor-interval=0.2"]
    command += ["-m", "tests.train.restarting_entry", *FLAGS]
    done = subprocess.run(
        [*command, "--run-dir", str(run), "--resume", "auto"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    pool.run(
        "tests.distributed.launch_task:train",
        timeout=300,
        flags=[*FLAGS, "--run-dir", str(whole)],
        ranks=2,
        port=free_port(),
    )
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [start["resumed_from"] for start in starts] == [None, 4]
    assert losses(run) == losses(whole)
    assert not (run / "lease.json").exists()


def test_every_rank_of_a_second_trainer_is_refused(pool, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    first = Lease(run)
    with pytest.raises(Exception, match="failed on 2 of 2 ranks") as refused:
        pool.run(
            "tests.distributed.launch_task:train",
            timeout=300,
            flags=[*FLAGS, "--run-dir", str(run), "--resume", "--train-iters", "9"],
            ranks=2,
            port=free_port(),
        )
    assert str(refused.value).count(f"in use by another trainer (process {os.getpid()} on ") == 2
    first.release()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_run_folder_that_cannot_be_made_is_one_line_of_every_rank(pool):
    with pytest.raises(Exception, match="failed on 2 of 2 ranks") as refused:
        pool.run(
            "tests.distributed.launch_task:train",
            timeout=300,
            flags=[*FLAGS, "--run-dir", "/proc/run"],
            ranks=2,
            port=free_port(),
        )
    line = "\nmegasink.errors.UserError: --run-dir /proc/run cannot be written: "
    assert str(refused.value).count(line) == 2
