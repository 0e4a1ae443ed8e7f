"""LoRA beside sinks and gates that are trained, and the commands on an adapter of peft's."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megasink.data.corpus import Document
from megasink.data.tokenizer import train_tokenizer
from tests import runs
from tests.distributed.layout import SINGLE

TASKS = "tests.lora.tasks"
MODELS = {
    "sinks": ["--attention-variant", "sink", "--softmax-offset-init", "1.0"],
    "gates": ["--attention-variant", "gated"],
    "elementwise": ["--attention-variant", "gated", "--gate-granularity", "elementwise"],
}


def megasink(pool, *commands):
    """(exit code, output, error stream) of each command line, in a worker."""
    argvs = [[str(word) for word in command] for command in commands]
    (answers,) = pool.run(f"{TASKS}:megasink", SINGLE, commands=argvs)
    return answers


@pytest.mark.parametrize("name", MODELS)
def test_what_is_trained_beside_the_adapter_is_merged_and_not_for_peft(pool, tmp_path, name):
    train = [*runs.TINY, *runs.UNTIED, *runs.MOCK, *MODELS[name], "--init-method-std", "0.2"]
    train += ["--lr", "3e-2", "--train-iters", "2", "--save-interval", "2"]
    base, run = tmp_path / "base", tmp_path / "run"
    pool.train([*train, "--run-dir", str(base)])
    also = "sinks" if name == "sinks" else "gates"
    lora = ["--lora-rank", "2", "--lora-targets", "q_proj", "down_proj", "--lora-train", also]
    split = ["--tensor-model-parallel-size", "2"]
    pool.train(
        [*train, *lora, *split, "--pretrained-checkpoint", str(base), "--run-dir", str(run)], 2
    )
    (found,) = pool.run(f"{TASKS}:logits_of", SINGLE, run=str(run))
    scale = np.abs(found["merged"]).max()
    np.testing.assert_allclose(found["unmerged"], found["merged"], atol=1e-5 * scale, rtol=0)
    (stored,) = pool.run(f"{TASKS}:adapter_tensors", SINGLE, run=str(run))
    beside = [key for key in stored if "lora_" not in key]
    assert len(beside) == 1
    assert len(stored) == 5
    if also == "gates":  # a change, from 0
        assert np.abs(stored[beside[0]]).max() > 1e-3
    refused, merged = megasink(
        pool,
        ["convert-to-hf", run, tmp_path / "adapter", "--adapter"],
        ["convert-to-hf", run, tmp_path / "hf"],
    )
    assert refused[0] == 2
    assert f"--adapter: the run also trained {beside[0]} (--lora-train)" in refused[2]
    assert not (tmp_path / "adapter").exists()
    assert (merged[0], merged[2]) == (0, "")
    assert "float32: logits differ by" in merged[1]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter of rank 3 for q_proj and v_proj, as peft writes it."""
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(2):
        for name, rows in (("q_proj", 64), ("v_proj", 32)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(3, 48, generator=generator)
            tensors[f"{at}.lora_B.weight"] = torch.randn(rows, 3, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_every_command_reads_a_run_with_an_adapter(pool, adapter, tmp_path):
    tokenizer, text = tmp_path / "tokenizer", Path(argparse.__file__)
    train_tokenizer([Document(text.read_text(), "test")], 400, tokenizer)
    base = tmp_path / "base"
    pool.run(
        "tests.convert.tasks:save_run",
        SINGLE,
        folder=str(base),
        name="plain-text",
        tokenizer=str(tokenizer),
    )
    run = tmp_path / "run"
    answers = megasink(
        pool,
        ["convert-from-hf", adapter, run, "--base", base],
        ["convert-to-hf", base, tmp_path / "hf-base", "--no-verify"],
        ["convert-to-hf", run, tmp_path / "hf", "--tokenizer", tokenizer],
        ["generate", run, "--prompt", "1", "--max-new-tokens", "4", "--tokenizer", tokenizer],
        [
            *("analyze", run, "--data", text, "--max-samples", "2", "--seq-length", "24"),
            *("--output", tmp_path / "analysis", "--device", "cpu", "--tokenizer", tokenizer),
        ],
        ["convert-to-hf", run, tmp_path / "again", "--adapter", "--tokenizer", tokenizer],
    )
    for code, _, errors in answers:
        assert code == 0, errors
    before, after, again, first = (
        load_file(path)
        for path in (
            tmp_path / "hf-base/model.safetensors",
            tmp_path / "hf/model.safetensors",
            tmp_path / "again/adapter_model.safetensors",
            adapter / "adapter_model.safetensors",
        )
    )
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], first[name]) for name in first)
    for name, weight in after.items():
        at = f"base_model.model.{name.removesuffix('.weight')}"
        change = torch.zeros_like(weight)
        if f"{at}.lora_A.weight" in first:
            change = 2.0 * first[f"{at}.lora_B.weight"] @ first[f"{at}.lora_A.weight"]
        torch.testing.assert_close(weight, before[name] + change, rtol=1e-6, atol=1e-6)
    assert (
        "--lora-rank 3 --lora-alpha 6 --lora-targets q_proj v_proj"
        in (run / "flags.txt").read_text()
    )


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("base_model.model.model.layers.0.mlp.gate.lora_A.weight", "has no place"),
        ("base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight", "not there for all 2"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", "with 64 outputs"),
    ],
)
def test_an_adapter_of_another_model_is_refused(pool, adapter, tmp_path, name, phrase):
    base = tmp_path / "base"
    pool.run("tests.convert.tasks:save_run", SINGLE, folder=str(base), name="plain-text")
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[name] = torch.ones(3, 48) if "lora_A" in name else torch.ones(48, 3)
    other = tmp_path / "adapter"
    other.mkdir()
    save_file(tensors, other / "adapter_model.safetensors")
    config = (adapter / "adapter_config.json").read_text()
    (other / "adapter_config.json").write_text(config)
    ((code, _, said),) = megasink(
        pool, ["convert-from-hf", other, tmp_path / "run", "--base", base]
    )
    assert (code, phrase in said) == (2, True), said
    assert not (tmp_path / "run").exists()
