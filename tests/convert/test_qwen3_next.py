"""Qwen3-Next with delta-net and experts: imported, trained under TP and PP, resumed, exported."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.convert.collection import IMPORTED, config_of
from tests.convert.models_page import EXPERTS, LAYOUTS
from tests.convert.test_commands import megasink
from tests.distributed.layout import SINGLE
from tests.runs import resumed_from, steps

TRAIN = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --seq-length 32 --num-workers 0
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --eval-iters 1 --eval-interval 100
    --save-interval 3 --log-interval 1 --head-balance-coeff 0.1
""".split()


@pytest.fixture(scope="module")
def released(pool, tmp_path_factory):
    """A folder with hf, a random model of transformers, and run, its import."""
    folder = tmp_path_factory.mktemp("qwen3-next")
    config = config_of(*IMPORTED["Qwen3-Next-80B-A3B"])
    where = {"folder": str(folder), "config": config}
    pool.run("tests.convert.accuracy_tasks:import_released", SINGLE, **where)
    return folder


def test_its_head_of_multi_token_prediction_is_ignored(pool, released, tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = load_file(released / "hf/model.safetensors")
    save_file(tensors | {"mtp.fc.weight": torch.ones(2)}, path, {"format": "pt"})
    shutil.copy(released / "hf/config.json", tmp_path)
    command = ["convert-from-hf", tmp_path, "--output", tmp_path / "run"]
    ((code, said, errors),) = megasink(pool, command)
    assert (code, errors) == (0, "")
    assert "ignored: mtp.fc.weight\n" in said
    assert "100% of 16 generated tokens" in said


def test_layouts_train_alike_resume_and_are_exported(pool, released, tmp_path):
    flags = (released / "run/flags.txt").read_text().split()
    start = ["--load", str(released / "run/checkpoints"), "--finetune"]
    found = {}
    for layout, chosen in LAYOUTS.items():
        run = tmp_path / layout.replace(" ", "")
        experts = EXPERTS if layout == "TP 2" else []
        line = [*flags, *TRAIN, *chosen, *experts, *start, "--run-dir", str(run)]
        pool.train([*line, "--train-iters", "3"], 2)
        pool.train([*line, "--train-iters", "5", "--resume", "--override-opt-param-scheduler"], 2)
        assert resumed_from(run) == [None, 3]
        found[layout] = steps(run)
        assert len(found[layout]) == 5
        assert all(step["layers"] == [3] for step in found[layout] if "importance" in step)
        # It compares the logits, and ends with an error if they differ.
        command = ["convert-to-hf", run, "--output", tmp_path / f"hf-{run.name}"]
        ((code, said, errors),) = megasink(pool, command)
        assert (code, errors) == (0, "")
        assert "target: Qwen3NextForCausalLM (qwen3_next): as it was imported" in said
    for tensor, pipeline in zip(*found.values(), strict=True):
        for name in ("lm_loss", "balance_loss"):
            assert tensor[name] == pytest.approx(pipeline[name], rel=1e-4)
    assert tensor["balance_loss"] > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layers.0.self_attn.k_norm.weight is missing"),
        ({"linear_value_head_dim": 16}, "the shape does not match config.json"),
    ],
)
def test_layers_that_the_weights_contradict_are_one_line(pool, released, tmp_path, change, said):
    save_file(load_file(released / "hf/model.safetensors"), tmp_path / "model.safetensors")
    config = json.loads((released / "hf/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    command = ["convert-from-hf", tmp_path, "--output", tmp_path / "run"]
    ((code, _, errors),) = megasink(pool, command)
    assert code != 0
    assert said in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "run").exists()
