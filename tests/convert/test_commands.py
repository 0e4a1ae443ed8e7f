"""The command lines: what comes along, other attention on the way in, bad input, a kill."""

import base64
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megasink.convert.sink_calibration import sink_logits
from megasink.data.corpus import Document
from megasink.data.hf_tokenizer import train_tokenizer
from tests.distributed.layout import SINGLE
from tests.hub_server import TOKEN, serving
from tests.light import environment
from tests.test_packaging import ROOT, requirements

TASKS = "tests.convert.tasks"
STDLIB = Path(os.__file__).parent


def megasink(pool, *commands):
    """(exit code, output, error stream) of each command line, in a worker."""
    argvs = [[str(word) for word in command] for command in commands]
    (answers,) = pool.run("tests.training.generate_tasks:megasink", SINGLE, commands=argvs)
    return answers


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer folder of 400 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    text = (STDLIB / "argparse.py").read_text()
    train_tokenizer([Document(text, "test")], 400, folder)
    return folder


@pytest.fixture(scope="module")
def runs(pool, tokenizer, tmp_path_factory):
    """Run folders: with sinks in bf16, with plain attention, with biases too."""
    folder = tmp_path_factory.mktemp("runs")
    options = {"tokenizer": str(tokenizer)}
    for name, model, bf16 in (
        ("sink", "sink-text", True),
        ("plain", "plain-text", False),
        ("biased", "biased-text", False),
        ("gated", "gated-text", True),
    ):
        where = {"folder": str(folder / name), "name": model}
        pool.run(f"{TASKS}:save_run", SINGLE, **where, bf16=bf16, **options)
    return folder


@pytest.fixture(scope="module")
def plain(pool, runs):
    """The run with plain attention as a Hugging Face folder."""
    pool.run(f"{TASKS}:export_only", SINGLE, run=str(runs / "plain"), output=str(runs / "hf"))
    return runs / "hf"


def test_a_checkpoint_is_read_without_megatron(runs, plain, tmp_path):
    """Of the light weight; to verify, the model of the run is needed, and says so."""
    light, output = tmp_path / "light", tmp_path / "hf"
    packages = environment.make(light, requirements())
    (packages / "megasink").symlink_to(ROOT / "megasink")
    command = [
        "python",
        "-m",
        "megasink",
        "convert-to-hf",
        str(runs / "plain"),
        "--output",
        str(output),
    ]
    refused = environment.run(light, *command)
    assert refused.returncode == 2
    assert "pip install 'megasink[train]'" in refused.stderr
    assert not output.exists()
    done = environment.run(light, *command, "--no-verify")
    assert done.returncode == 0, done.stderr
    weights = "model.safetensors"
    assert (output / weights).read_bytes() == (plain / weights).read_bytes()


def test_an_export_verifies_itself_and_takes_everything_along(pool, runs, tmp_path):
    output, steps = tmp_path / "hf", [{"iteration": n, "lm_loss": n / 2} for n in (2, 3, 4)]
    steps.insert(1, {"iteration": 2, "valid_lm_loss": 1.6})
    (runs / "sink" / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    ((code, said, errors),) = megasink(
        pool, ["convert-to-hf", runs / "sink", "--output", output, "--shard-size", "20KB"]
    )
    assert (code, errors) == (0, "")
    assert "target: GraniteSWAForCausalLM (granite_swa): the first that supports" in said
    assert re.search(
        r"verified on \d+ tokens of text, float32: logits differ by at most .*e-0", said
    )
    assert "verified in bfloat16" in said
    index = json.loads((output / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 5
    assert {path.name for path in output.glob("*.safetensors")} == files
    sizes = [(output / name).stat().st_size for name in files]
    tensors = {k: v for name in files for k, v in load_file(output / name).items()}
    assert set(tensors) == set(index["weight_map"])
    largest = max(t.nbytes for t in tensors.values())
    assert max(sizes) < max(20_000, largest) + 5_000
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    sinks = tensors["model.layers.0.self_attn.sinks"]
    assert sinks.dtype == torch.bfloat16
    assert tensors["model.norm.weight"].dtype == torch.bfloat16
    card = (output / "README.md").read_text()
    assert "steps | 3 |" in card
    assert "| training loss | 1.5 |" in card
    assert "| validation loss | 1.6, at step 2 |" in card
    assert "arxiv.org/abs/2602.01203" in card
    assert (output / "tokenizer.json").is_file()
    config = json.loads((output / "config.json").read_text())
    assert config["eos_token_id"] == 1
    assert config["dtype"] == "bfloat16"
    assert json.loads((output / "generation_config.json").read_text())["eos_token_id"] == 1
    assert not list(tmp_path.glob(".*"))


def test_an_export_is_pushed_once_it_is_verified(runs, tmp_path):
    out = tmp_path / "out"
    line = ["convert-to-hf", runs / "plain", "--output", out, "--push", "me/exported"]
    with serving({}) as hub:
        for flags, token, answer in (
            ((), "", "--push me/exported: no token for the Hugging Face hub"),
            ((), "hf_bad", "--push me/exported: http://127.0.0.1"),
            (("--no-verify",), TOKEN, "--push uploads only verified exports: drop --no-verify"),
        ):
            done = hub.run(*line, *flags, cwd=tmp_path, HF_TOKEN=token)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
            assert done.stderr.startswith(f"megasink: error: {answer}")
            assert not out.exists()
        assert [asked for asked in hub.asked if asked.startswith("POST")] == []
        done = hub.run(*line, cwd=tmp_path, HF_TOKEN=TOKEN)
        assert done.returncode == 0, done.stderr
        assert done.stdout.index("verified on") < done.stdout.index("pushed to http://127.0.0.1")
        uploaded = [entry["value"] for entry in hub.commits if entry["key"] == "file"]
    files = {entry["path"]: entry["content"] for entry in uploaded}
    assert set(files) == {path.name for path in out.iterdir()}
    weights = base64.b64decode(files["model.safetensors"])
    assert weights == (out / "model.safetensors").read_bytes()


def test_a_model_of_no_architecture_brings_its_own_code(pool, runs, tmp_path):
    hf, back = tmp_path / "hf", tmp_path / "back"
    exported, imported = megasink(
        pool,
        ["convert-to-hf", runs / "gated", "--output", hf],
        ["convert-from-hf", hf, "--output", back],
    )
    for code, said, errors in (exported, imported):
        assert (code, errors) == (0, "")
        assert re.search(r"verified on \d+ tokens of text, float32: logits differ by", said)
        assert "verified in bfloat16" in said
    assert "target: MegasinkForCausalLM (megasink): no architecture of transformers" in exported[1]
    assert "which need trust_remote_code=True" in exported[1]
    card = (hf / "README.md").read_text()
    assert 'from_pretrained("FOLDER", trust_remote_code=True)' in card
    assert "import only torch and transformers" in card
    assert (hf / "modeling_megasink.py").is_file()
    assert "--attention-variant gated" in (back / "flags.txt").read_text()


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_a_plain_model_gets_gates_and_the_same_logits(pool, plain, tmp_path, granularity):
    run = tmp_path / "run"
    flags = ["--attention-variant", "gated", "--gate-granularity", granularity]
    ((code, said, errors),) = megasink(pool, ["convert-from-hf", plain, "--output", run, *flags])
    assert (code, errors) == (0, "")
    assert "100.00% of positions, 100% of 16 generated tokens" in said
    flags = (run / "flags.txt").read_text()
    assert "--attention-variant gated" in flags
    assert f"--gate-granularity {granularity}" in flags
    assert f"--load {run}/checkpoints --finetune" in said


def test_the_gate_of_a_model_with_biases_has_one_too(pool, runs, tmp_path):
    hf, out = tmp_path / "hf", tmp_path / "run"
    shutil.copytree(runs / "biased", tmp_path / "biased")
    pool.run(f"{TASKS}:export_only", SINGLE, run=str(tmp_path / "biased"), output=str(hf))
    for path in hf.glob("tokenizer*"):
        path.unlink()
    ((code, said, errors),) = megasink(
        pool, ["convert-from-hf", hf, "--output", out, "--attention-variant", "gated"]
    )
    assert (code, errors) == (0, "")
    assert "100.00% of positions" in said
    assert "linear_gate.bias" in (out / "checkpoints/iter_0000000/.metadata").read_text("latin1")


def test_a_plain_model_gets_sinks_of_a_chosen_weight(pool, plain, tmp_path):
    run = tmp_path / "run"
    flags = ["--attention-variant", "sink", "--sink-weight", "0.2"]
    first, second = megasink(
        pool,
        ["convert-from-hf", plain, "--output", run, *flags],
        ["generate", run, "--prompt", "def", "--max-new-tokens", "2", "--temperature", "0"],
    )
    assert (first[0], first[2]) == (0, "")
    assert "verified" in first[1]  # the model before its sinks draw anything
    before, after = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+) nats", first[1]).groups())
    assert before != after
    (weights,) = pool.run(f"{TASKS}:mean_sink_weights", SINGLE, run=str(run))
    assert weights == pytest.approx([0.2] * len(weights), abs=1e-4)
    assert second[0] == 0


def test_sink_logits_give_the_mean_weight():
    lse = torch.tensor([[0.0, 1.0, 8.0], [-30.0, -29.0, -31.0]])
    for weight in (0.01, 0.5, 0.97):
        logits = sink_logits(lse, weight)
        means = torch.sigmoid(logits[:, None] - lse).mean(dim=1)
        assert means == pytest.approx([weight, weight], abs=1e-5)
    assert sink_logits(torch.zeros(1, 4), 0.5).tolist() == pytest.approx([0.0], abs=1e-6)


def refused(pool, command, *words):
    """One clear line, exit code 2, and no folder."""
    ((code, _, errors),) = megasink(pool, command)
    assert code == 2, errors
    assert errors.count("\n") == 1
    for word in words:
        assert word in errors
    output = Path(command[2])
    assert not output.exists() or any(output.iterdir())
    assert not list(output.parent.glob(f".{output.name}*"))


def test_bad_exports_are_one_clear_line(pool, runs, tokenizer, tmp_path):
    run, out = runs / "sink", tmp_path / "out"
    command = ["convert-to-hf", run, "--output", out, "--no-verify"]
    refused(pool, [command[0], tmp_path / "nowhere", *command[2:4]], "nowhere does not exist")
    refused(pool, [*command, "--target", "llama"], "vanilla attention, not sink")
    refused(pool, [*command, "--target", "gpt5"], "unknown: choose llama")
    refused(pool, [*command, "--iteration", "9"], "no checkpoint of iteration 9; it has 3")
    refused(pool, [*command, "--shard-size", "big"], "--shard-size big")
    refused(pool, [*command, "--tokenizer", tmp_path], "the tokenizer in")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    refused(pool, ["convert-to-hf", run, "--output", tmp_path / "full"], "not empty")
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    (part,) = (broken / "checkpoints" / "iter_0000003").glob("*.distcp")
    content = part.read_bytes()
    part.unlink()
    refused(pool, ["convert-to-hf", broken, "--output", out], "damaged", part.name, "missing")
    part.write_bytes(content[:-100])
    refused(pool, ["convert-to-hf", broken, "--output", out], "damaged", part.name, "--iteration")
    # transformers has a tokenizer of its own for this architecture.
    refused(
        pool, ["convert-to-hf", runs / "biased", "--output", out], "Qwen2Tokenizer", "tokens differ"
    )
    legacy = tmp_path / "legacy"
    shutil.copytree(run, legacy)
    shutil.rmtree(legacy / "checkpoints" / "iter_0000003")
    (legacy / "checkpoints" / "iter_0000003" / "mp_rank_00").mkdir(parents=True)
    refused(
        pool,
        ["convert-to-hf", legacy, "--output", out],
        "--ckpt-convert-format torch_dist",
        "old format",
    )


def edited(source, folder, **changes):
    """A copy of a Hugging Face folder with other tensors: None for none."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path) | {k.replace("__", "."): v for k, v in changes.items()}
    save_file({k: v for k, v in tensors.items() if v is not None}, path, {"format": "pt"})
    return folder


def test_bad_imports_are_one_clear_line(pool, plain, tmp_path):
    out = tmp_path / "out"

    def bad(folder, *words, flags=()):
        refused(pool, ["convert-from-hf", folder, "--output", out, *flags], *words)

    norm = "model__norm__weight"
    bad(edited(plain, tmp_path / "a", **{norm: None}), "model.norm.weight is missing")
    bad(edited(plain, tmp_path / "b", model__x=torch.ones(2)), "has no model.x")
    bad(edited(plain, tmp_path / "c", **{norm: torch.ones(3)}), "model.norm.weight [3]", "shape")
    nan = torch.full((48,), float("nan"))
    bad(edited(plain, tmp_path / "d", **{norm: nan}), "model.norm.weight contains NaN", "48 of 48")
    whole = {norm: torch.ones(48, dtype=torch.uint8)}
    bad(edited(plain, tmp_path / "j", **whole), "model.norm.weight is U8")
    bad(tmp_path / "nowhere", "no such folder")
    cut = edited(plain, tmp_path / "e")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-64])
    bad(cut, "model.safetensors is broken")
    pickled = edited(plain, tmp_path / "f")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    bad(pickled, "pytorch_model.bin is a pickle")
    sharded = edited(plain, tmp_path / "g", model__x=torch.ones(2))
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    bad(sharded, "has no model.x")  # a single file goes first, as in transformers
    (sharded / "model.safetensors").unlink()
    bad(sharded, "model-00001-of-00002.safetensors is missing")
    unlisted = edited(plain, tmp_path / "i", model__x=torch.ones(2))
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (unlisted / "model.safetensors.index.json").write_text(json.dumps(index))
    bad(unlisted, "has no model.x")
    tied = edited(plain, tmp_path / "k")  # transformers keeps the head apart
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    bad(tied, "lm_head.weight is not the embedding", flags=["--no-verify"])
    other = edited(plain, tmp_path / "h")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    bad(other, "400 tokens", "300")
    sink = ["--attention-variant", "sink"]
    bad(plain, "above 0 so that", flags=[*sink, "--sink-weight", "0"])
    bad(
        plain,
        "--gate-granularity",
        flags=[*sink, "--gate-granularity", "headwise"],
    )


def test_weights_that_differ_are_found_and_nothing_is_kept(pool, runs, tmp_path):
    output = tmp_path / "hf"
    (message,) = pool.run(
        f"{TASKS}:export_with_a_mistake", SINGLE, run=str(runs / "sink"), output=str(output)
    )
    assert "the conversion is not exact: logits differ by at most" in message
    assert not output.exists()
    assert not list(tmp_path.iterdir())
