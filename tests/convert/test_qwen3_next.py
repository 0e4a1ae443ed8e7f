"""Released models: what an import ignores, and what it refuses of Qwen3-Next."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.convert.collection import IMPORTED, config_of
from tests.convert.test_commands import megasink
from tests.distributed.layout import SINGLE


@pytest.fixture(scope="module")
def released(pool, tmp_path_factory):
    """A folder with hf, a random model of transformers, and run, its import."""
    folder = tmp_path_factory.mktemp("qwen3-next")
    config = config_of(*IMPORTED["Qwen3-Next-80B-A3B"])
    where = {"folder": str(folder), "config": config}
    pool.run("tests.convert.accuracy_tasks:import_released", SINGLE, **where)
    return folder


def test_layers_of_multi_token_prediction_are_ignored(pool, tmp_path):
    """DeepSeek-V3 numbers them after the last layer."""
    config = config_of(*IMPORTED["DeepSeek-V3"])
    where = {"folder": str(tmp_path), "config": config}
    pool.run("tests.convert.accuracy_tasks:import_released", SINGLE, **where)
    path, name = tmp_path / "hf/model.safetensors", "model.layers.{}.eh_proj.weight"
    number = json.loads((tmp_path / "hf/config.json").read_text())["num_hidden_layers"]
    tensors = load_file(path)
    for extra, known in ((0, True), (1, False)):
        added = {name.format(number + extra): torch.ones(2)}
        save_file(tensors | added, path, {"format": "pt"})
        command = ["convert-from-hf", tmp_path / "hf", "--output", tmp_path / f"run-{extra}"]
        ((code, said, errors),) = megasink(pool, command)
        assert (code == 0) is known, errors
        assert name.format(number + extra) in (said if known else errors)


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
