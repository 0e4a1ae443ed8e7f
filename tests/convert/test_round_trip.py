"""Every target: the logits of stock transformers, and the same bytes after a way back.

Not covered: TransformerEngine's spec (its keys, by tests/convert/test_reader.py, are), CUDA.
"""

import json

import pytest
from safetensors.torch import load_file, save_file

from tests.convert.models import FAMILIES, MODELS
from tests.distributed.layout import SINGLE, Layout

TASKS, TASKS_OF_HYBRIDS = "tests.convert.tasks", "tests.convert.hybrid_tasks"
TP, PP, TP_PP = Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2)
EP, TP_SP = Layout(dp=2, ep=2), Layout(tp=2, sp=True)


# One model of each target, and others with windows, are also run as they are served.
SERVED = {target for target, _ in MODELS.values()} | {
    "qwen3_5",
    "qwen3-windows",
    "lfm3-tied-window",
}
SINKS = ("granite_swa", "flint", "granitemoe_swa", "gpt_oss")


def _cases():
    """The first model of each target, but for those of test_collection.py; the others are later."""
    known = set()
    for name, (target, _) in MODELS.items():
        is_later = target in known or name in FAMILIES
        yield pytest.param(name, marks=[pytest.mark.later] if is_later else [])
        known.add(target)


@pytest.mark.parametrize("name", _cases())
def test_every_target(pool, tmp_path, name):
    pool.run(f"{TASKS}:save_run", SINGLE, folder=str(tmp_path / "run"), name=name)
    (report,) = pool.run(f"{TASKS}:round_trip", SINGLE, folder=str(tmp_path), name=name)
    assert report["target"] == MODELS[name][0]
    exported, imported = report["differences"]
    for difference in (exported, imported):
        assert 0 < difference["logits"] <= difference["tolerance"]
        assert difference["largest"] > 3  # small logits would hide a mistake
        assert difference["argmax"] == difference["generated"] == 1
    assert exported["logits"] == imported["logits"]  # the same weights, to the bit
    assert report["equal"]
    assert report["architecture"]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["vocab_size"] == 101
    if name in SERVED:
        (served,) = pool.run(
            "tests.convert.serving_tasks:served",
            SINGLE,
            folder=str(tmp_path / "hf"),
            implementations=["eager", "sdpa"],
        )
        if report["target"] in SINKS:  # it would drop them
            assert "does not support" in served.pop("sdpa")
        for result in served.values():
            assert result["logits"] <= 1e-4
            assert result["generated"]


HYBRID = """
    llama-tied-geglu llama-bias nanochat qwen3-windows mixtral granite_swa gpt_oss-biases lfm3
    qwen3_5-headwise-relu own-sigmoid-router
"""


@pytest.mark.parametrize("name", HYBRID.split())
def test_a_hybrid_of_like_blocks_is_exported_as_a_gpt_model(pool, tmp_path, name):
    """The same bytes; its weights are read from the GPT model's checkpoint."""
    gpt, hybrid = str(tmp_path / "gpt"), str(tmp_path / "hybrid")
    pool.run(f"{TASKS}:save_run", SINGLE, folder=gpt, name=name)
    (different,) = pool.run(f"{TASKS_OF_HYBRIDS}:export_of_both", SINGLE, gpt=gpt, hybrid=hybrid)
    assert different == []


def test_a_gpt_oss_of_before_it_had_zeros_comes_in(pool, tmp_path):
    """Without biases in attention, and with the default RoPE."""
    run, old = tmp_path / "run", tmp_path / "old"
    pool.run(f"{TASKS}:save_run", SINGLE, folder=str(run), name="gpt_oss")
    pool.run(f"{TASKS}:export_only", SINGLE, run=str(run), output=str(old))
    weights, path = old / "model.safetensors", old / "config.json"
    first = weights.read_bytes()
    tensors = load_file(weights)
    save_file({n: t for n, t in tensors.items() if not n.endswith("_proj.bias")}, weights)
    config = json.loads(path.read_text())
    del config["rope_scaling"]
    config |= {"attention_bias": False, "megasink": {"attention": "sink", "zero_centred": False}}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    path.write_text(json.dumps(config))
    pool.run(f"{TASKS}:import_only", SINGLE, hf=str(old), output=str(tmp_path / "back"))
    again = {"run": str(tmp_path / "back"), "output": str(tmp_path / "again")}
    pool.run(f"{TASKS}:export_only", SINGLE, **again)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == first


def test_the_writer_lets_go_of_what_it_has_written(pool, tmp_path):
    folder = str(tmp_path / "checkpoint")
    (most,) = pool.run(f"{TASKS}:most_held_while_writing", SINGLE, folder=folder, count=20)
    assert most <= 2  # one is written while the next is made


def exports(pool, folder, name, *layouts):
    """The bytes of the export of a run under each layout."""
    for layout in layouts:
        run, hf = folder / f"run-{layout}", folder / f"hf-{layout}"
        pool.run(f"{TASKS}:save_run", layout, folder=str(run), name=name)
        pool.run(f"{TASKS}:export_only", SINGLE, run=str(run), output=str(hf))
    return [(folder / f"hf-{layout}" / "model.safetensors").read_bytes() for layout in layouts]


def test_rounding_that_a_model_makes_large_is_not_a_mistake(pool, tmp_path):
    """Massive states do: SmolLM2 with sinks, trained on, was 0.00094 apart, 0.0011 by rounding."""
    run, output = str(tmp_path / "run"), str(tmp_path / "hf")
    pool.run(f"{TASKS}:save_run", SINGLE, folder=run, name="granite_swa")
    (lines,) = pool.run(f"{TASKS}:export_of_massive_states", SINGLE, run=run, output=output)
    assert sum("in every weight changes the logits by up to" in x for x in lines) == 1


LAID_OUT = ["granite_swa", "dots1", "qwen3_5", "lfm3", "qwen3_next-headwise", "qwen3_next-shared"]


@pytest.mark.parametrize("name", LAID_OUT)
def test_the_layout_of_a_run_does_not_matter(pool, tmp_path, name):
    layouts = (EP, TP_SP) if MODELS[name][1].experts else (TP, PP)
    files = exports(pool, tmp_path, name, SINGLE, *layouts)
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("name", ["granite_swa-tied-windows", "qwen3_5-headwise-relu"])
def test_tensor_and_pipeline_parallelism_at_once(four, tmp_path, name):
    four.run(f"{TASKS}:save_run", TP_PP, folder=str(tmp_path / "run"), name=name)
    single = {"folder": str(tmp_path / "single"), "name": name}
    four.run(f"{TASKS}:save_run", SINGLE, **single)
    contents = set()
    for run in ("single", "run"):
        output = tmp_path / f"hf-{run}"
        four.run(f"{TASKS}:export_only", SINGLE, run=str(tmp_path / run), output=str(output))
        contents.add((output / "model.safetensors").read_bytes())
    assert len(contents) == 1


@pytest.mark.parametrize("name", ["qwen3_5", "lfm3", "mixtral"])
def test_an_import_loads_under_another_layout(pool, tmp_path, name):
    pool.run(f"{TASKS}:save_run", SINGLE, folder=str(tmp_path / "run"), name=name)
    pool.run(f"{TASKS}:export_only", SINGLE, run=str(tmp_path / "run"), output=str(tmp_path / "hf"))
    folders = {"hf": str(tmp_path / "hf"), "output": str(tmp_path / "back")}
    pool.run(f"{TASKS}:import_only", SINGLE, **folders)
    checkpoint = str(tmp_path / "back" / "checkpoints" / "iter_0000000")
    for layout in (TP_SP, EP) if MODELS[name][1].experts else (TP, PP):
        reports = pool.run(f"{TASKS}:loaded_weights", layout, checkpoint=checkpoint, name=name)
        assert reports == [[]] * 2


LOGITS_WITH = "tests.convert.accuracy_tasks:logits_with"
OF_TRAINING = {
    "moe_expert_capacity_factor": 0.5,
    "moe_pad_expert_input_to_capacity": True,
    "moe_input_jitter_eps": 0.3,
    "moe_router_force_load_balancing": True,
    "moe_router_force_biased": 0.5,
}


def test_a_loaded_model_routes_as_its_export_does(pool, tmp_path):
    """Megatron drops tokens and routes at random in evaluation, too: each would change logits."""
    run = str(tmp_path / "run")
    pool.run(f"{TASKS}:save_run", SINGLE, folder=run, name="granitemoe_swa")
    ((usual, logits),) = pool.run(LOGITS_WITH, SINGLE, run=run, **OF_TRAINING)
    assert abs(usual).max() > 3
    assert (usual == logits).all()
