"""An analysis that is killed, or shared by processes: its numbers do not change by a bit."""

import json
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from megasink.analysis import ranks
from megasink.analysis import result_store as stores
from megasink.analysis.capture.input_samples import Sample
from megasink.analysis.measure import MOST, plan
from megasink.analysis.pages import analysis_page as pages
from megasink.analysis.ranks import Ranks, taking_part
from megasink.analysis.result_store import Store
from megasink.cli import main
from megasink.errors import UserError
from megasink.transformers.model_identity import weights_hash
from tests.analysis.capture.tiny_models import REAL_TEXTS, save_with_tokenizer, tiny_model
from tests.distributed.pool import free_port
from tests.forkserver import server

SHARDS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with explicit gates, texts of many lengths, and an analysis without interruption."""
    root = tmp_path_factory.mktemp("resuming")
    lines = [line * 5 for line in "".join(REAL_TEXTS).splitlines() if len(line) > 60]
    texts = [text[: 40 + 7 * i] for i, text in enumerate(lines[:24])]
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    save_with_tokenizer(root, "lfm3", texts)
    analyze(root, root / "whole")
    return root


def command(folder, output):
    flags = f"analyze {folder}/lfm3 --data {folder}/texts.jsonl --output {output} --device cpu"
    flags += " --seq-length 24 --max-samples 24 --batch-size 2"
    return f"{flags} --inputs natural random --metrics gradient"


def analyze(folder, output, *flags):
    """In this process, without drawing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "figures", lambda analyses, kinds: [])
        return main([*command(folder, output).split(), *flags])


def results(output):
    """Everything that was measured, as bytes: results.json, and the arrays of samples.npz."""
    assert not (output / "partial").exists()
    with np.load(output / "samples.npz") as arrays:
        found = {name: arrays[name].tobytes() for name in arrays.files}
    return (output / "results.json").read_bytes(), found


@pytest.fixture(scope="module")
def killed(folder):
    """What a process left that was killed with SIGKILL after some of its shards."""
    output = folder / "killed"
    call = "megasink.analysis.result_store:Store.write"
    line = f"tests.waiting SIGKILL {call} 6 {command(folder, output)}"
    assert server().run(line.split()).returncode == -signal.SIGKILL
    assert len(list(output.glob("partial/shard_*.npz"))) == 5
    assert not (output / "results.json").exists()
    return output


def test_a_killed_analysis_goes_on_where_it_stopped(folder, killed, tmp_path, capsys):
    output = tmp_path / "again"
    shutil.copytree(killed, output)
    there = sorted(output.glob("partial/shard_*.npz"))
    times = [path.stat().st_mtime_ns for path in there]
    for flags, difference in (
        (["--batch-size", "4"], "--batch-size 2 -> 4"),
        (["--max-samples", "23"], "data "),
        (["--dtype", "bfloat16"], "dtype float32 -> bfloat16"),
    ):
        assert analyze(folder, output, *flags) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 or "Loading" in error
        assert "holds an unfinished analysis with other settings (" in error
        assert difference in error
    assert [path.stat().st_mtime_ns for path in there] == times
    assert analyze(folder, output) == 0
    assert f"resuming: {len(there)} of {SHARDS} parts" in capsys.readouterr().err
    assert results(output) == results(folder / "whole")


def test_two_ranks_of_torchrun_find_the_same(folder, killed):
    """They share what the killed process has not done."""
    launcher = f"torch.distributed.run --master-port {free_port()} --nproc-per-node 2"
    line = f"{launcher} -m tests.analysis.capture.without_figures {command(folder, killed)}"
    done = server().run(line.split(), tree=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote ") == 1  # the first rank's
    assert done.stderr.count("resuming: ") == 1
    assert results(killed) == results(folder / "whole")


def test_a_full_disk_loses_nothing(folder, tmp_path, capsys, monkeypatch):
    output, write = tmp_path / "full", stores.write_arrays

    def full(path, arrays, of):
        if path.name == "shard_00007.npz":
            raise OSError(28, "No space left on device")
        write(path, arrays, of)

    with monkeypatch.context() as patch:
        patch.setattr(stores, "write_arrays", full)
        assert analyze(folder, output) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"megasink: error: {output}/partial cannot be written: No space left")
    assert len(list(output.glob("partial/*.npz"))) == 7
    with monkeypatch.context() as patch:
        last = Path("shard_00007.npz")
        patch.setattr(np, "savez_compressed", lambda *_, **__: full(last, {}, ""))
        assert analyze(folder, output) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"megasink: error: --output {output} cannot be written: No space")
    assert sorted(path.name for path in output.iterdir()) == ["partial", "settings.json"]
    assert analyze(folder, output) == 0
    assert f"resuming: {SHARDS} of {SHARDS} parts" in capsys.readouterr().err
    assert results(output) == results(folder / "whole")


def test_a_broken_part_is_named(folder, tmp_path):
    part = tmp_path / "shard_00000.npz"
    part.write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(UserError, match=r"shard_00000.npz is damaged .* delete it"):
        Store(tmp_path, {}).read("shard_00000.npz")


def test_shards_are_few_and_whole():
    samples = [Sample((0,) * (2 + i % 5), "d", "s") for i in range(1000)]
    shards = plan(samples, 7)
    assert len(shards) <= MOST
    assert sorted(i for shard in shards for batch in shard for i in batch) == list(range(1000))
    for batch in (batch for shard in shards for batch in shard):
        assert 1 <= len(batch) <= 7
        assert len({len(samples[i].tokens) for i in batch}) == 1


def test_every_change_of_a_weight_is_seen():
    model = tiny_model("llama")
    before = weights_hash(model)
    assert weights_hash(tiny_model("llama")) == before
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight[7, 5] = torch.nextafter(weight[7, 5], torch.tensor(9.0))
        assert weights_hash(model) != before
        weight.copy_(tiny_model("llama").model.layers[1].mlp.up_proj.weight)
        assert weights_hash(model) == before
        weight.copy_(weight.roll(1, 0))  # the sum of the bits stays
    assert weights_hash(model) != before


def test_the_first_to_fail_is_heard_and_ends_the_others(monkeypatch):
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 0)
    store = HashStore()
    waiting: list[object] = []

    def wait():
        rank = Ranks(store, 0, 2)
        rank.enter("a")
        try:
            rank.wait("measured", rank.size)
        except SystemExit as stop:
            waiting.append(stop.code)

    thread = threading.Thread(target=wait)
    thread.start()
    monkeypatch.setattr(Ranks, "from_environment", lambda: Ranks(store, 1, 2))
    with pytest.raises(UserError, match="broken"), taking_part():
        raise UserError("broken")
    thread.join(600)
    assert waiting == [2]
    with pytest.raises(SystemExit) as second, taking_part():
        raise UserError("broken too")
    assert second.value.code == 2


def test_claims_are_shared_and_counted_anew_for_each_analysis():
    store = HashStore()
    first, second = Ranks(store, 0, 2), Ranks(store, 1, 2)
    for analysis in ("a", "b"):
        first.enter(analysis)
        second.enter(analysis)
        one, two = first.claims(5), second.claims(5)
        taken = [next(one), next(two), next(two), next(one)]
        assert sorted([*taken, *one, *two]) == [0, 1, 2, 3, 4]


def test_a_device_for_each_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Ranks(HashStore(), 5, 8).device("cuda") == "cuda:1"
    assert Ranks(HashStore(), 5, 8).device("cpu") == "cpu"
    assert Ranks().device("cuda:3") == "cuda:3"
    with pytest.raises(UserError, match="cuda:0 with 8 processes"):
        Ranks(HashStore(), 5, 8).device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="machine with 2 CUDA devices: start at most 2"):
        Ranks(HashStore(), 2, 8).device("cuda")


def test_a_folder_that_is_not_shared_is_named(tmp_path):
    with pytest.raises(UserError, match="does not exist on every machine"):
        Store(tmp_path, {}).check_shared()
