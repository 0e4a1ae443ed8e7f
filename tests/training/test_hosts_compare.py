"""What hosts compare, without the hosts: facts, shared folders, and who is there."""

import functools
import hashlib
import importlib
import itertools
import json
import re
import shutil
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megasink import plugins
from megasink.data.dataset_files import contents
from megasink.errors import UserError
from megasink.training import compare_hosts as hosts
from megasink.training import host_fingerprint as fingerprint
from megasink.training import multi_host_torchrun as torchrun
from megasink.training import waiting
from megasink.training.host_fingerprint import differences, facts_of
from tests.distributed.pool import free_port
from tests.forkserver import HANG_SECONDS
from tests.parsing import read
from tests.runs import TINY
from tests.waiting import until

PLUGIN = "tests.training.host_plugin"
SOURCE = functools.cache(fingerprint._source)  # a second each, of Megatron's files


@pytest.fixture(autouse=True)
def remembered(monkeypatch):
    monkeypatch.setattr(fingerprint, "_source", SOURCE)


def arguments(*flags, rank=0):
    own = {"rank": rank, "world_size": 2, "distributed_timeout_minutes": 1}
    return SimpleNamespace(**vars(read([*TINY, *flags])) | own)


@pytest.fixture
def data(tmp_path):
    """Two copies of a data set and its tokenizer."""
    for name in ("one", "two"):
        (tmp_path / name / "tokenizer").mkdir(parents=True)
        (tmp_path / name / "tokenizer" / "tokenizer.json").write_text("{}")
        for kind in (".idx", ".bin"):
            (tmp_path / name / f"text{kind}").write_bytes(bytes(1 << 20))
    return tmp_path


def of(folder, *flags):
    flags = ["--data-path", "1", str(folder / "text"), *flags]
    return facts_of(arguments("--tokenizer-model", str(folder / "tokenizer"), *flags))


def test_copies_elsewhere_are_the_same_and_what_differs_is_named(data):
    one, two = data / "one", data / "two"
    assert differences(of(one), of(two), "a") == []
    (two / "tokenizer" / "merges.txt").write_text("a b")
    with (two / "text.bin").open("r+b") as file:
        file.write(b"\1")
    given = ["--data-path", "2", str(two / "text"), "--lr", "0.5"]
    merges = f"sha256 {hashlib.sha256(b'a b').hexdigest()[:16]}"
    digests = [hashlib.sha256((f / "text.bin").read_bytes()).hexdigest() for f in (one, two)]
    one_bin, two_bin = (f"{1 << 20:,} bytes, sha256 {digest[:16]}" for digest in digests)
    assert differences(of(two, *given), of(one), "a") == [
        "--data-path 2 (a: 1)",
        "--lr 0.5 (a: 0.001)",
        f"merges.txt of --tokenizer-model {merges} (a: missing)",
        f"the .bin of data set 1 of --data-path {two_bin} (a: {one_bin})",
    ]
    assert differences(of(one), of(two), "a") == [
        f"merges.txt of --tokenizer-model missing (a: {merges})",
        f"the .bin of data set 1 of --data-path {one_bin} (a: {two_bin})",
    ]


def test_code_and_versions_are_facts(data, monkeypatch):
    facts = of(data / "one")
    assert {"version of torch", "version of megasink", "the source of megatron.core"} <= set(facts)
    files = {"compare_hosts.py", "recipes/p0-0.6b.toml"}
    assert {f"megasink/training/{file}" for file in files} <= set(facts)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setitem(plugins.LOADED, PLUGIN, plugins.Plugin(PLUGIN, "--plugin"))
    mine = "megasink/cli/__init__.py"
    other = of(data / "one") | {mine: "sha256 1"}
    assert other.pop(f"the source of --plugin {PLUGIN}").startswith("sha256 ")
    assert differences(other, facts, "a") == [
        f"{mine} sha256 1 (a: {facts[mine]})",
        "variable NVTE_FLASH_ATTN 0 (a: missing)",
    ]


def test_modules_that_a_plugin_imports_are_facts(data, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = tmp_path / "a_helper_of_a_plugin.py"
    found = []
    for text in ("A = 1", "A = 2"):
        helper.write_text(text)
        importlib.import_module(helper.stem)
        found.append(of(data / "one"))
    del sys.modules[helper.stem]
    (line,) = differences(*found, "a")
    assert line.startswith(f"the source of module {helper.stem} sha256 ")


def test_a_large_file_is_compared_by_samples_and_its_checksum(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fingerprint, "WHOLE", 1 << 10)
    monkeypatch.setattr(fingerprint, "_TOTAL", 1 << 10)
    flags = ["--data-path", str(tmp_path / "text")]
    content = bytearray(1 << 20)

    def described(**sidecar):
        for kind in (".idx", ".bin"):
            (tmp_path / f"text{kind}").write_bytes(content)
        (tmp_path / "text.json").write_text(json.dumps(sidecar))
        facts = facts_of(arguments(*flags))
        assert "2 of 2 files are above 0 MB: the hosts compare samples" in capsys.readouterr().out
        return facts["the .bin of data set 1 of --data-path"]

    plain = described()
    assert plain.startswith("1,048,576 bytes, samples ")
    content[1 << 15] = 1  # between two samples
    assert described() == plain
    assert (
        described(sha256={".bin": "a" * 64}) == f"{plain}, sha256 {'a' * 16} according to its .json"
    )
    content[0] = 1
    assert described() != plain


def test_a_file_is_the_one_whose_checksum_its_json_has(tmp_path):
    (tmp_path / "text.bin").write_bytes(b"1234")
    recorded = hashlib.sha256(b"1234").hexdigest()
    sidecar = tmp_path / "text.json"
    prefix = str(tmp_path / "text")
    for text in ({}, {"sha256": {".bin": recorded}}, {"sha256": [1]}, {"sha256": {".bin": None}}):
        sidecar.write_text(json.dumps(text))
        assert contents(prefix, ".bin") == (f"4 bytes, sha256 {recorded[:16]}", True)
    sidecar.write_text(json.dumps({"sha256": {".bin": "b" * 64}}))
    with pytest.raises(UserError, match=f"has the SHA-256 {recorded[:16]}, but .* {'b' * 16}"):
        contents(prefix, ".bin")


def meet(here, there, monkeypatch):
    """What rank 0 says when it compares its host with that of rank 1; None if they are alike."""
    monkeypatch.setattr(hosts, "_SHARED_SECONDS", 0.3)
    monkeypatch.setenv("MASTER_ADDR", "a")
    store, found = dist.HashStore(), []

    def compare():
        try:
            hosts.compare(store, here)
        except UserError as error:
            found.append(str(error))

    first = threading.Thread(target=compare)
    first.start()
    hosts.answer(store, there)
    first.join()
    return found[0] if found else None


@pytest.mark.parametrize("flag", ["--run-dir", "--save", "--data-cache-path"])
def test_folders_that_are_not_shared_are_named(flag, tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    given = ["--mock-data"] if flag != "--data-cache-path" else []
    args = [arguments(*given, flag, str(folder), rank=r) for r, folder in enumerate((here, there))]
    missing = f"{flag} {there} is {there} (missing), not the same folder as on"
    assert missing in meet(*args, monkeypatch)
    there.mkdir()
    assert missing.replace("missing", "empty") in meet(*args, monkeypatch)
    there.rmdir()
    there.symlink_to(here)
    assert meet(*args, monkeypatch) is None
    assert [path.name for path in tmp_path.iterdir()] == ["there"]  # nothing is left
    there.unlink()
    here.write_text("")
    assert f"{flag} {here} cannot be written" in meet_alone(args[0])


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "lease", "metrics.jsonl"])
def test_what_a_link_in_the_run_folder_leads_to_is_shared(name, tmp_path, monkeypatch):
    """Two mounts of one run folder, whose link leads to another place on each host."""
    run = tmp_path / "run"
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
        (place / "x").write_text("")
    run.mkdir()
    args = [arguments("--mock-data", "--run-dir", str(run), rank=rank) for rank in (0, 1)]
    names = threading.local()
    real = hosts._real
    names.place = places[1]  # of this thread, which is host B

    def of_host(path):
        place = getattr(names, "place", places[0])
        return place if path.name == name else real(path)

    (run / name).symlink_to(places[0] / "x" if "." in name else places[0])
    monkeypatch.setattr(hosts, "_real", of_host)
    assert f"is {places[1]} (not empty), not the same folder as on" in meet(*args, monkeypatch)
    names.place = places[0]
    assert meet(*args, monkeypatch) is None
    assert [sorted(p.name for p in place.iterdir()) for place in places] == [["x"], ["x"]]


def test_a_checkpoint_that_only_one_host_sees_is_named(tmp_path, monkeypatch):
    run = tmp_path / "run"
    saved = run / "checkpoints" / "iter_0000002"
    saved.mkdir(parents=True)
    (saved / ".metadata").write_text("")
    args = [arguments("--mock-data", "--run-dir", str(run), rank=rank) for rank in (0, 1)]
    for one in args:
        one.save = str(run / "checkpoints")
    assert meet(*args, monkeypatch) is None
    newest = hosts._newest_files
    monkeypatch.setattr(hosts, "_newest_files", lambda folder: [*newest(folder), "iter_0000002/x"])
    assert "has no iter_0000002/x, which " in meet(*args, monkeypatch)


@pytest.mark.parametrize("ahead", [40, -40, 5])
def test_a_clock_that_is_far_from_that_of_rank_0_is_named(ahead, monkeypatch):
    """However fast torchrun has started the ranks: they compare clocks before they begin."""
    main, ticks = threading.get_ident(), itertools.count()  # this thread is host B

    def now():  # goes on by itself: a thread may wait long for its turn
        return 1e-6 * next(ticks) + ahead * (threading.get_ident() != main)

    clock = vars(time) | {"time": now}
    monkeypatch.setattr(hosts, "time", SimpleNamespace(**clock))
    said = meet(*(arguments("--mock-data", rank=rank) for rank in (0, 1)), monkeypatch)
    assert said is None if ahead == 5 else f" differs by {ahead:+} s from that of " in said


def meet_alone(args):
    with pytest.raises(UserError) as error:
        hosts.compare(dist.HashStore(), args)
    return str(error.value)


def test_a_rank_that_cannot_compare_says_so(tmp_path, monkeypatch):
    args = arguments("--mock-data", "--tokenizer-model", str(tmp_path))
    monkeypatch.setattr("megasink.training.host_fingerprint.digests", lambda folder: 1 / 0)
    shutil.rmtree(tmp_path)
    there = arguments("--mock-data", "--tokenizer-model", str(tmp_path.parent), rank=1)
    said = meet(args, there, monkeypatch)
    assert said.startswith(f"{waiting.here()}: ZeroDivisionError: division by zero")


@pytest.mark.parametrize(("world", "expected"), [("2", None), ("2", "2"), ("1", "2"), ("3", "2")])
def test_another_number_of_ranks_is_refused(world, expected, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world)
    if expected:
        monkeypatch.setenv(waiting.RANKS, expected)
    if expected in (None, world):
        waiting.refuse_another_world()
        return
    with pytest.raises(UserError, match=rf"{world} rank.* met, but .* is {expected}: .* clocks"):
        waiting.refuse_another_world()


def test_a_host_says_for_whom_it_waits_and_what_others_lost(monkeypatch, capfd):
    monkeypatch.setattr(waiting, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(torchrun, "_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(torchrun, "_SECONDS", HANG_SECONDS)
    heard = ""

    def said(words):
        nonlocal heard
        heard += capfd.readouterr().err
        return words in heard

    port = free_port()
    here = torchrun.Hosts(f"127.0.0.1:{port}", 2, "run", "10.0.0.1")
    until(lambda: said(f" s for 127.0.0.1:{port}, where no torchrun answers\n"))
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    name = socket.gethostname()
    until(lambda: str(here) == f"1 of 2 hosts at 127.0.0.1:{port} (here: {name})")
    there = torchrun.Hosts(f"127.0.0.1:{port}", 2, "run", "10.0.0.2")  # a container of that name
    until(lambda: here.have_met and there.have_met)
    assert [here.name(), there.name()] == [f"{name} (10.0.0.1)", f"{name} (10.0.0.2)"]
    leaving = threading.Thread(target=there.leave, args=("megasink: b: rank 1 was ended",))
    leaving.start()
    until(lambda: said("megasink: b: rank 1 was ended\n"))
    here.leave("megasink: a: rank 0 was ended")
    leaving.join()
    assert store.num_keys()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"number": 3}, r"has NNODES=2, but \S+ has NNODES=3: give every host the same"),
        ({"job": "other"}, r"has the run run, but \S+ has other at 127\.0\.0\.1:\d+: give"),
        ({"ahead": 40.0}, r"clock of b differs by \+\d\d s from that of a \(synchronize"),
        ({"ahead": -40.0}, r"clock of b differs by -\d\d s from that of a \(synchronize"),
    ],
)
def test_hosts_that_cannot_train_together_are_named(change, named, monkeypatch):
    """Host A hears of B what is `change`d, and ends if B is of its own job."""
    monkeypatch.setattr(torchrun, "_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(torchrun, "_SECONDS", HANG_SECONDS)
    said, ended = [], []
    monkeypatch.setattr(torchrun, "write_to_stderr", said.append)
    monkeypatch.setattr(torchrun.os, "_exit", ended.append)
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(torchrun, "here", lambda: "a")
    here = torchrun.Hosts(f"127.0.0.1:{port}", 2, "run", "10.0.0.1")
    until(lambda: here._here)
    ahead = change.pop("ahead", 0.0)
    other = {"id": "1", "host": "b", "address": "", "number": 2, "job": "run"} | change
    store.append("megasink/here", json.dumps(other) + "\n")
    until(lambda: store.set("megasink/clock/1", str(time.time() + ahead)) or said)
    here._leaving.set()
    here._thread.join()
    assert re.search(named, said[0])
    assert bool(ended) == ("job" not in change)


def test_the_job_of_a_host_is_its_run_folder(monkeypatch):
    monkeypatch.delenv("RUN_DIR", raising=False)
    assert torchrun._job(["--lr", "1"]) == "megasink"
    monkeypatch.setenv("RUN_DIR", "runs/a")
    assert torchrun._job(["--lr", "1"]) == "runs/a"
    assert torchrun._job(["--run-dir", "runs/b", "--lr", "1", "--run-dir=runs/c"]) == "runs/c"


def test_a_checkpoint_that_is_loaded_is_a_fact(data):
    saved = data / "checkpoints" / "iter_0000002"
    saved.mkdir(parents=True)
    (saved.parent / "latest_checkpointed_iteration.txt").write_text("2")
    load = ["--load", str(saved.parent), "--finetune"]
    found = []
    for text in ("{}", "{ }"):
        (saved / "metadata.json").write_text(text)
        found.append(of(data / "one", *load))
    (line,) = differences(*found, "a")
    step = r"step 2, 1 files, sha256 \w+"
    assert re.fullmatch(rf"--load {step} \(a: {step}\)", line)
