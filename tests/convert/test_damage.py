"""Broken checkpoints, disks and weights: one clear line each, and nothing left behind."""

import copy
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megasink.checkpoints.torch_metadata import read_metadata
from megasink.convert import to_hf
from megasink.convert.to_hf import refuse_nan
from megasink.errors import UserError
from tests.distributed.layout import SINGLE

TASKS = "tests.convert.tasks"
ROOT = Path(__file__).resolve().parents[2]
ITERATION = "checkpoints/iter_0000003"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module")
def run(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    pool.run(f"{TASKS}:save_run", SINGLE, folder=str(folder), name="granite_swa")
    return folder


@pytest.fixture(scope="module")
def hf(pool, run):
    folder = run.parent / "hf"
    pool.run(f"{TASKS}:export_only", SINGLE, run=str(run), output=str(folder))
    return folder


@pytest.fixture
def other(run, tmp_path):
    """A copy to break."""
    shutil.copytree(run, tmp_path / "other")
    return tmp_path / "other"


def refused(run, output, *words):
    """The message, which is one line; nothing is left of the output."""
    with pytest.raises(UserError) as caught:
        to_hf.export(to_hf.source_of(run), output, say=lambda line: None)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert not output.exists()
    assert not list(output.parent.glob(f".{output.name}*"))


def test_a_flipped_bit_of_a_weight_is_found_while_it_is_read(other, tmp_path):
    entries = read_metadata(other / ITERATION).storage_data
    where = next(entry for index, entry in entries.items() if index.fqn == QKV)
    path = other / ITERATION / where.relative_path
    content = bytearray(path.read_bytes())
    content[where.offset + where.length // 2] ^= 4
    path.write_bytes(content)
    refused(
        other, tmp_path / "out", "cannot be read", "self_attention.linear_qkv.weight", "checksum"
    )


def test_a_weight_too_many_is_named(other, tmp_path):
    metadata = read_metadata(other / ITERATION)
    extra = "decoder.layers.1.mlp.linear_fc3.weight"
    metadata.state_dict_metadata[extra] = metadata.state_dict_metadata[QKV]
    for index, where in list(metadata.storage_data.items()):
        if index.fqn == QKV:
            twin = copy.replace(index, fqn=extra) if hasattr(copy, "replace") else None
            twin = twin or type(index)(extra, index.offset, index.index)
            metadata.storage_data[twin] = where
    (other / ITERATION / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(
        other,
        tmp_path / "out",
        "different model",
        "no tensor for decoder.layers.0.mlp.linear_fc3.weight",
    )


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("num_layers", 1, ", not [1, "),
        ("num_layers", 3, ", not [3, "),
        ("ffn_hidden_size", 32, "linear_fc1.weight is [2, 80, 48], not [2, 64, 48]"),
        ("num_attention_heads", 8, "linear_qkv.weight is [2, 128, 48], not [2, 192, 48]"),
        ("hidden_size", 64, "64]"),
    ],
)
def test_a_checkpoint_of_another_model_is_said(other, tmp_path, option, value, said):
    config = json.loads((other / "config.json").read_text())
    config["arguments"][option] = value
    (other / "config.json").write_text(json.dumps(config))
    refused(other, tmp_path / "out", "different model than config.json describes", said)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_a_number_is_refused_and_where(value, dtype):
    largest = torch.finfo(dtype).max
    fine = torch.full((7, 9), largest, dtype=dtype)  # their sum is not finite
    refuse_nan("w", fine)
    refuse_nan("w", torch.empty(0, 4, dtype=dtype))
    fine[3, 5] = value
    with pytest.raises(UserError, match=r"w contains NaN or infinity \(1 of 63 .* \[3, 5\]\)"):
        refuse_nan("w", fine)


FULL = """
import resource, signal, sys
from pathlib import Path
from megasink.convert import to_hf
from megasink.errors import UserError
source = to_hf.source_of(Path(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    to_hf.export(source, Path(sys.argv[2]), say=lambda line: None, shard_bytes=int(sys.argv[3]))
except UserError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.parametrize("shard_bytes", [10**9, 50_000])
def test_a_disk_that_takes_no_more_ends_in_one_line(run, tmp_path, shard_bytes):
    command = [sys.executable, "-c", FULL, str(run), str(tmp_path / "out"), str(shard_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2, done.stderr
    assert "out cannot be written" in done.stdout
    assert done.stdout.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_is_rounded_on_the_way_in_is_said(pool, hf, tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(hf, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    command = ["convert-from-hf", str(folder), "--output", str(tmp_path / "out"), "--no-verify"]
    ((answer,),) = pool.run("tests.training.generate_tasks:megasink", SINGLE, commands=[command])
    code, said, _ = answer
    assert code == 0
    words = "rounded to bfloat16, as config.json specifies: 23 tensors, the first model.embed"
    assert words in said


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("way", ["out", "in"])
def test_without_memory_for_two_models_every_tensor_is_compared(
    pool, run, hf, tmp_path, way, damaged
):
    (report,) = pool.run(
        "tests.convert.accuracy_tasks:convert_in_little_memory",
        SINGLE,
        source=str(run if way == "out" else hf),
        output=str(tmp_path / "to"),
        damaged=damaged,
    )
    if damaged:
        assert (
            "differs from the written data" in report["message"] or "checksum" in report["message"]
        )
        assert not list(tmp_path.iterdir())
        return
    assert report["message"] is None
    count = 23 if way == "out" else 17
    assert report["lines"][-1].startswith(
        f"verified: {count} tensors are identical on both sides. Not verified: logits"
    )
