"""Copies of checkpoints in an object store: a local S3 server."""

import json
import shutil
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from megasink.checkpoint.find import find_checkpoint
from megasink.checkpoint.intact import checkpoint_path, iterations
from megasink.checkpoint.store import CheckpointStore, DamagedCopyError
from megasink.cli import main
from megasink.data import object_store
from megasink.errors import UserError
from megasink.train import checkpoint_copies, early
from megasink.train.checkpoint_copies import Copier, copying_checkpoints, prepare
from megasink.train.checks import checkpoints
from megasink.train.replay import replayed
from tests import runs
from tests.distributed.pool import free_port
from tests.train.six_steps import FLAGS, losses, resumed_from

PLACES = ["s3://corpora/runs/a", "msc://stored/runs/a"]


@pytest.fixture(params=PLACES)
def url(request, store):
    if request.param.startswith("msc"):
        pytest.importorskip("multistorageclient")
    return request.param


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a run with checkpoints at 2, 4 and 6."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    return folder


def started(folder, url, *, resume=None, differences=lambda config, saved: []):
    folder.mkdir(exist_ok=True)
    args = Namespace(checkpoint_store=url, resume=resume, verify_checkpoint=False)
    prepare(folder, args, differences)


def copied(folder, url, every=None):
    copier = Copier(CheckpointStore(url), folder, every, checksums=True)
    copier.end()
    return copier


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("layout", [["--async-save"], []], ids=["async", "sync"])
def test_a_run_goes_on_from_the_store_alone(layout, finished, server, pool, tmp_path):
    """On another machine: nothing of the run folder is there."""
    url = f"s3://corpora/runs/resumed{len(layout)}"
    ranks = ["--use-distributed-optimizer"]  # two replicas

    def train(folder, *flags):
        pool.run(
            "tests.train.store_tasks:train",
            flags=[*FLAGS, *ranks, *layout, *flags, "--run-dir", str(folder)],
            ranks=2,
            port=free_port(),
            variables=server.variables,
        )

    auto = ["--resume", "auto"]
    train(tmp_path / "whole")
    train(tmp_path / "a", *auto, "--checkpoint-store", url, "--exit-interval", "4")
    (tmp_path / "a").rename(tmp_path / "gone")
    train(tmp_path / "a", *auto, "--checkpoint-store", url)
    assert resumed_from(tmp_path / "a") == 4
    assert losses(tmp_path / "a") == losses(tmp_path / "whole")
    keys = {key["Key"] for key in server.client.list_objects(Bucket="corpora")["Contents"]}
    base = url.removeprefix("s3://corpora/")
    assert {f"{base}/whole/iter_{step:07d}.json" for step in (2, 4, 6)} <= keys


def test_copies_are_whole_or_not_there(url, run, tmp_path, monkeypatch):
    started(run, url)
    store = CheckpointStore(url)
    upload, sent = object_store.upload, []

    def dies(path, to):
        if sent:
            raise KeyboardInterrupt
        sent.append(upload(path, to))

    monkeypatch.setattr(object_store, "upload", dies)
    with pytest.raises(KeyboardInterrupt):
        store.upload(run, run / "checkpoints", 6)
    monkeypatch.setattr(object_store, "upload", upload)
    assert sent
    assert store.iterations() == []
    copied(run, url)
    assert store.iterations() == [6]  # those before this start are not copied
    store.upload(run, run / "checkpoints", 2)
    tracker = object_store.read(f"{url}/checkpoints/latest_checkpointed_iteration.txt")
    assert tracker == b"6"
    started(tmp_path / "new", url, resume="auto")
    there = checkpoint_path(tmp_path / "new" / "checkpoints", 6)
    assert content(there) == content(checkpoint_path(run / "checkpoints", 6))
    assert (tmp_path / "new" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(object_store, "upload", pytest.fail)
    copied(tmp_path / "new", url)  # the same one is there


def test_a_damaged_copy_gives_way_to_the_one_before(url, run, tmp_path, capsys):
    started(run, url)
    store = CheckpointStore(url)
    for step in (2, 4, 6):
        store.upload(run, run / "checkpoints", step)
    shard = f"{url}/checkpoints/iter_0000006/__0_0.distcp"
    damaged = bytearray(object_store.read(shard))
    damaged[len(damaged) // 2] ^= 1
    object_store.write(shard, bytes(damaged))
    object_store.remove(f"{url}/checkpoints/iter_0000004/metadata.json")
    shutil.rmtree(run / "checkpoints")
    started(run, url, resume="auto")
    assert iterations(run / "checkpoints") == [2]
    out = capsys.readouterr().out
    assert f"{shard} is damaged" in out
    assert "iter_0000004/metadata.json is missing" in out
    assert not list(run.glob("checkpoints/.*"))
    with pytest.raises(DamagedCopyError):
        store.download(store.copy(6), tmp_path)
    # The list itself may come from somebody else.
    lines = json.loads(object_store.read(f"{url}/whole/iter_0000006.json"))
    for bad in ({"files": {"../x": [1, ""]}}, {"run": ["../../x"]}, {"files": 3}):
        object_store.write(f"{url}/whole/iter_0000006.json", json.dumps(lines | bad).encode())
        with pytest.raises(UserError, match="does not list a checkpoint"):
            store.copy(6)


def test_the_command_lists_copies_and_downloads_one(url, run, tmp_path, capsys):
    started(run, url)
    for step in (2, 6):
        CheckpointStore(url).upload(run, run / "checkpoints", step)
    assert main(["checkpoints", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "2", "6"]
    new = tmp_path / "new"
    assert main(["checkpoints", url, "--fetch", str(new), "--iteration", "2"]) == 0
    assert find_checkpoint(new).iteration == 2
    assert main(["checkpoints", str(new), "--verify"]) == 0
    assert "verified, --resume auto takes it" in capsys.readouterr().out
    started(new, url, resume="auto")  # it may go on there
    assert iterations(new / "checkpoints") == [2, 6]
    assert main(["checkpoints", url, "--fetch", str(tmp_path / "x"), "--iteration", "4"]) == 2
    assert "no such checkpoint that is whole; there are: 2, 6" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_store_belongs_to_one_run(store, run, tmp_path):
    url = PLACES[0]
    started(run, url)
    copied(run, url)
    started(run, url, resume="newest")
    for other, resume in [("other", None), ("run", None)]:
        with pytest.raises(UserError, match="holds the checkpoints of another run: give another"):
            started(tmp_path / other, url, resume=resume)
    with pytest.raises(UserError, match=r"another configuration \(seed 1 -> 2\)"):
        started(tmp_path / "b", url, resume="auto", differences=lambda *_: ["seed 1 -> 2"])
    assert not (tmp_path / "b" / "config.json").exists()
    (run / "checkpoint-store.json").unlink()
    with pytest.raises(UserError, match="holds the checkpoints of another run"):
        started(run, url, resume="auto")  # it has checkpoints of its own


def test_training_goes_on_without_the_store(store, run, monkeypatch, capsys):
    started(run, PLACES[0])
    monkeypatch.setattr(checkpoint_copies, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(checkpoint_copies, "_WAITS", (0.01,))
    write, down = object_store.write, threading.Event()
    down.set()

    def goes_away(url, content):
        if down.is_set():
            raise UserError(f"{url} cannot be written: EndpointConnectionError")
        write(url, content)

    monkeypatch.setattr(object_store, "write", goes_away)
    options = {"rank": 0, "checkpoint_store": PLACES[0], "run_dir": str(run)}
    args = Namespace(**options, save_retain_interval=4, verify_checkpoint=False)
    with (
        pytest.raises(UserError, match="but the checkpoint of step 6 is not in s3://corpora"),
        copying_checkpoints(args),
    ):
        pass
    assert "training goes on, and it is tried again" in capsys.readouterr().out
    with copying_checkpoints(args):
        down.clear()
    assert CheckpointStore(PLACES[0]).iterations() == [6]


def test_the_rule_deletes_a_checkpoint_after_it_was_copied(store, run, monkeypatch):
    from megasink.train.keep_checkpoints import delete_previous

    started(run, PLACES[0])
    tracker = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    last = checkpoint_path(run / "checkpoints", 6)
    aside = last.rename(run / "later")
    tracker.write_text("2")
    uploading, goes_on = threading.Event(), threading.Event()
    upload = CheckpointStore.upload

    def slow(*args):
        uploading.set()
        assert goes_on.wait(60)
        upload(*args)

    monkeypatch.setattr(CheckpointStore, "upload", slow)
    args = Namespace(rank=0, checkpoint_store=PLACES[0], run_dir=str(run), save_retain_interval=4)
    shutil.rmtree(checkpoint_path(run / "checkpoints", 4))
    args.verify_checkpoint = False
    with copying_checkpoints(args):
        assert uploading.wait(60)
        aside.rename(last)
        tracker.write_text("6")
        options = {"checksums": False, "has_ended": lambda: False, "lower": pytest.fail}
        delete_previous(str(run / "checkpoints"), 2, **options)
        assert iterations(run / "checkpoints") == [2, 6]
        goes_on.set()
    assert iterations(run / "checkpoints") == [6]
    assert CheckpointStore(PLACES[0]).iterations() == [2, 6]


def test_bad_credentials_and_bad_flags_are_said_before_the_first_step(store, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(UserError, match=r"run.json cannot be read: EndpointConnectionError"):
        started(tmp_path / "run", PLACES[0])
    flags = [*runs.TINY, *runs.MOCK, "--train-iters", "2", "--checkpoint-store"]
    found = "\n".join(checkpoints.problems(early.read([*flags, "s3://a?b", "--save", "/x"])))
    for part in (
        "--checkpoint-store: a s3:// URL with '@' or '?' is not taken",
        "--checkpoint-store without --run-dir",
        "drop --save /x",
    ):
        assert part in found
    assert list(checkpoints.problems(early.read([*flags, PLACES[0], "--run-dir", "/x"]))) == []
    last = ["--checkpoint-store", PLACES[0]]
    with pytest.raises(UserError, match="which is not reused"):
        replayed(last, [], Path("/x"))
