"""Released models: what an import ignores; Qwen3-Next is trained, analyzed and exported."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.convert.collection import IMPORTED, config_of
from tests.convert.models_page import EXPERTS, LAYOUTS, TRAIN
from tests.convert.test_commands import megasink
from tests.distributed.layout import SINGLE
from tests.runs import resumed_from, steps


@pytest.fixture(scope="module")
def released(pool, tmp_path_factory):
    """A folder with hf, a random model of transformers, and run, its import: G-GEGE*E."""
    folder = tmp_path_factory.mktemp("qwen3-next")
    config = config_of(*IMPORTED["Qwen3-Next-80B-A3B"])
    where = {"folder": str(folder), "config": config | {"mlp_only_layers": [0]}}
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


@pytest.fixture(scope="module")
def trained(pool, released):
    """The runs of three steps from the import, under two layouts, and the flags of the last."""
    flags = [*(released / "run/flags.txt").read_text().split(), *TRAIN, "--save-interval", "3"]
    flags += ["--load", str(released / "run/checkpoints"), "--finetune"]
    for layout, chosen in LAYOUTS.items():
        line = [*flags, *chosen, "--run-dir", str(released / layout)]
        pool.train([*line, *(EXPERTS if layout == "TP 2" else []), "--train-iters", "3"], 2)
    return released, line


def test_it_trains_alike_under_both_layouts_and_resumes(pool, trained):
    """TP 2 with SP and EP 2, and PP 2."""
    folder, line = trained
    tp, pp = ([step["lm_loss"] for step in steps(folder / layout)] for layout in LAYOUTS)
    assert len({*pp}) == len(pp) == 3
    assert tp == pytest.approx(pp, rel=1e-5)
    more = ["--train-iters", "4", "--resume", "--override-opt-param-scheduler"]
    pool.train([*line, *more], 2)
    assert resumed_from(folder / "PP 2") == [None, 3]
    assert len(steps(folder / "PP 2")) == 4


def test_a_trained_run_is_exported_and_its_analysis_is_that_of_the_export(pool, trained, tmp_path):
    """Of a pattern of all kinds: block 0 has an FFN, the others experts; block 3 has heads."""
    run = trained[0] / "TP 2"
    ((code, said, errors),) = megasink(pool, ["convert-to-hf", run, "--output", tmp_path / "hf"])
    assert (code, errors) == (0, "")
    assert "target: Qwen3NextForCausalLM (qwen3_next)" in said
    assert "100% of 16 generated tokens" in said
    assert json.loads((tmp_path / "hf/config.json").read_text())["mlp_only_layers"] == [0]
    where = {"run": str(run), "folder": str(tmp_path / "hf")}
    ((ours, theirs),) = pool.run("tests.convert.hybrid_tasks:analyses", SINGLE, **where)
    assert ours["heads"] == theirs["heads"] == [0, 0, 0, 4]
    assert ours["metrics"].keys() == theirs["metrics"].keys() >= {"importance", "sink_rate"}
    assert (ours["metrics"]["importance"][3] > 0).all()
    for name, values in ours["metrics"].items():
        expected = theirs["metrics"][name]
        # A share of values below a threshold changes by 1.6e-4 with one of them.
        most = 1e-3 if name.startswith("sparsity") else 1e-4
        assert values == pytest.approx(expected, rel=1e-3, abs=most, nan_ok=True), name
