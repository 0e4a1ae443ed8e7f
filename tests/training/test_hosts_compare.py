"""What hosts compare, without the hosts: facts, shared folders, and who is there."""

import shutil
import threading

import pytest
import torch.distributed as dist

from megasink import plugins
from megasink.errors import UserError
from megasink.plugins import Plugin
from megasink.training import early, hosts, meeting, waiting
from megasink.training.host_facts import differences, facts_of
from tests.distributed.pool import free_port
from tests.runs import TINY
from tests.waiting import until

PLUGIN = "tests.training.host_plugin"


def arguments(*flags, rank=0):
    args = early.read([*TINY, *flags])
    args.rank, args.world_size, args.distributed_timeout_minutes = rank, 2, 1
    return args


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
    assert differences(of(two, *given), of(one), "a") == [
        "--data-path 2 (a: 1)",
        "--lr 0.5 (a: 0.001)",
        "merges.txt of --tokenizer-model is another than on a",
        "the .bin of data set 1 of --data-path is another than on a",
    ]
    assert differences(of(one), of(two), "a") == [
        "merges.txt of --tokenizer-model is missing",
        "the .bin of data set 1 of --data-path is another than on a",
    ]


def test_code_and_versions_are_facts(data, monkeypatch):
    facts = of(data / "one")
    assert {"version of torch", "version of megasink", "megasink/training/hosts.py"} <= set(facts)
    assert {"megasink/training/recipes/p0-0.6b.toml", "the source of megatron.core"} <= set(facts)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setitem(plugins.LOADED, PLUGIN, Plugin(PLUGIN, "--plugin"))
    other = of(data / "one") | {"megasink/cli/__init__.py": "sha256 1"}
    assert other.pop(f"the source of --plugin {PLUGIN}").startswith("sha256 ")
    assert differences(other, facts, "a") == [
        "megasink/cli/__init__.py is another than on a",
        "variable NVTE_FLASH_ATTN 0 (a: unset)",
    ]


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
    assert f"{flag} {there} is another folder than on" in meet(*args, monkeypatch)
    there.mkdir()
    assert f"{flag} {there} is another folder than on" in meet(*args, monkeypatch)
    there.rmdir()
    there.symlink_to(here)
    assert meet(*args, monkeypatch) is None
    assert [path.name for path in tmp_path.iterdir()] == ["there"]  # nothing is left
    there.unlink()
    here.write_text("")
    assert f"{flag} {here} cannot be written" in meet_alone(args[0])


def meet_alone(args):
    with pytest.raises(UserError) as error:
        hosts.compare(dist.HashStore(), args)
    return str(error.value)


def test_a_rank_that_cannot_compare_says_so(tmp_path, monkeypatch):
    args = arguments("--mock-data", "--tokenizer-model", str(tmp_path))
    monkeypatch.setattr("megasink.training.host_facts.digests", lambda folder: 1 / 0)
    shutil.rmtree(tmp_path)
    there = arguments("--mock-data", "--tokenizer-model", str(tmp_path.parent), rank=1)
    said = meet(args, there, monkeypatch)
    assert said.startswith(f"{waiting.HERE}: ZeroDivisionError: division by zero")


@pytest.mark.parametrize(("world", "expected"), [("2", None), ("2", "2"), ("1", "2"), ("3", "2")])
def test_another_number_of_ranks_is_refused(world, expected, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world)
    if expected:
        monkeypatch.setenv(hosts.RANKS, expected)
    if expected in (None, world):
        hosts.refuse_another_world()
        return
    with pytest.raises(UserError, match=rf"{world} rank.* met, but .* make {expected}: .* clocks"):
        hosts.refuse_another_world()


def test_a_host_says_for_whom_it_waits_and_what_others_lost(monkeypatch, capfd):
    monkeypatch.setattr(waiting, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(meeting, "_SECONDS", 0.2)
    heard = ""

    def said(words):
        nonlocal heard
        heard += capfd.readouterr().err
        return words in heard

    port = free_port()
    here = meeting.Hosts(f"127.0.0.1:{port}", 2)
    until(lambda: said(f" s for 127.0.0.1:{port}, where no torchrun answers\n"))
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    until(lambda: here._here)
    assert str(here) == f"1 of 2 hosts at 127.0.0.1:{port} (here: {waiting.HERE})"
    monkeypatch.setattr(meeting, "HERE", "host-b")
    there = meeting.Hosts(f"127.0.0.1:{port}", 2)
    until(lambda: len(there._here) == 2)
    there.leave("megasink: host-b: rank 1 was ended by SIGKILL")
    until(lambda: said("megasink: host-b: rank 1 was ended by SIGKILL\n"))
    here.leave()
    assert store.num_keys()


def test_a_checkpoint_that_is_loaded_is_a_fact(data):
    saved = data / "checkpoints" / "iter_0000002"
    saved.mkdir(parents=True)
    (saved.parent / "latest_checkpointed_iteration.txt").write_text("2")
    load = ["--load", str(saved.parent), "--finetune"]
    found = []
    for text in ("{}", "{ }"):
        (saved / "metadata.json").write_text(text)
        found.append(of(data / "one", *load))
    assert differences(*found, "a") == ["--load is another than on a"]
