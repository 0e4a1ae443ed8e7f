"""The models of recipes: P0's are nanochat's, and each in a tiny shape from training to its export.

Not covered: bfloat16 (the example in test_example.py has it), sizes and layouts as the recipes have
them (test_recipes.py), CUDA.
"""

import importlib.util
import json
import shlex

import pytest

from megasink.training import recipes
from megasink.training.parse_arguments import set_decay
from tests import runs
from tests.distributed.layout import SINGLE
from tests.parsing import read
from tests.training.test_muon import resumed_at_two
from tests.training.test_recipes import VARIANTS, documented

TINY = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --lr 2e-2 --min-lr 0
    --lr-warmup-iters 1 --train-iters 4 --save-interval 2 --eval-interval 4 --eval-iters 1
    --split 80,20,0 --log-interval 1 --num-workers 0 --context-parallel-size 1
    --expert-model-parallel-size 1 --bf16=false
""")
SHAPES = {
    "p0": [],
    "p1": shlex.split("--num-query-groups 2 --kv-channels 16 --ffn-hidden-size 96"),
    "p2": ["--ffn-hidden-size", "96"],
}
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48".split()
# Muon's states are shared by replicas in bfloat16 alone.
ALONE = ["--use-distributed-optimizer=false", "--overlap-param-gather=false"]
# Every recipe as it is, and one of each model with the other attentions.
CASES = [("p0-0.6b", "sink"), ("p0-0.6b", "vanilla"), ("p0-0.6b", "gated")]
CASES += [
    (name, variant)
    for name in ("p0-0.6b-export", "p1-1.7b-28l", "p1-15a2b", "p2-60m")
    for variant in VARIANTS
]
CASES += [
    (name, "sink")
    for name in recipes.shipped()
    # test_readme.py trains and exports tiny.
    if name not in {case for case, _ in CASES} | {"p1-yarn-128k", "tiny"}
]


def line(name, variant):
    """The flags of a tiny model of a recipe."""
    before = [name.replace("-muon", "")] if "muon" in name else []
    flags = [
        "--recipe",
        *before,
        name,
        *TINY,
        *SHAPES.get(name[:2], []),
        *VARIANTS[variant].split(),
    ]
    flags += ALONE if before else EXPERTS if name == "p1-15a2b" else []
    return recipes.expanded(flags)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_a_recipe_from_training_to_its_export(pool, text, tmp_path, name, variant):
    if "muon" in name and importlib.util.find_spec("emerging_optimizers") is None:
        pytest.skip("megasink[muon] is missing")
    run, flags = tmp_path / "run", [*line(name, variant), *text]
    if name == "p1-long-32k":  # trains on
        before = tmp_path / "before"
        pool.train([*line("p1-1.7b-28l-3.5t", variant), *text, "--run-dir", str(before)])
        flags += ["--load", str(before / "checkpoints")]
    pool.train([*flags, "--run-dir", str(run)])
    again = resumed_at_two(run, tmp_path / "again")
    pool.train([*flags, "--run-dir", str(again), "--resume"])
    losses = [[step["lm_loss"] for step in runs.steps(folder)] for folder in (run, again)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    (found,) = pool.run(
        "tests.training.recipe_tasks:used", SINGLE, run=str(again), folder=str(tmp_path)
    )
    assert f": {found['class']} (" in found["said"]
    name = name.replace("-muon", "")
    column = list(VARIANTS).index(variant)
    assert documented("Exports")[name][column].strip("`") == found["target"]
    assert "same most likely token at 100.00% of positions, 100% of 16 generated" in found["said"]
    assert found["generated"] == found["greedy"]
    ours, theirs = (
        json.loads((tmp_path / page / "results.json").read_text())["metrics"]["importance"]
        for page in ("of-run", "of-hf")
    )
    for layer, expected in zip(ours["values"], theirs["values"], strict=True):
        assert layer == pytest.approx(expected, abs=1e-5)


def test_what_trains_nothing_has_nothing_to_export(pool, text, tmp_path):
    before, run = tmp_path / "before", tmp_path / "run"
    pool.train([*line("p1-1.7b-28l-3.5t", "vanilla"), *text, "--run-dir", str(before)])
    yarn = ["--yarn-original-max-position-embeddings", "16", "--run-dir", str(run)]
    flags = [*line("p1-yarn-128k", "vanilla"), *text, "--load", str(before / "checkpoints"), *yarn]
    pool.train(flags)
    ((code, _, errors),) = pool.run(
        "tests.training.generate_tasks:megasink",
        SINGLE,
        commands=[["convert-to-hf", str(run), "--output", str(tmp_path / "hf")]],
    )[0]
    assert code == 2
    assert "no finished checkpoint" in errors


@pytest.mark.parametrize(("name", "depth"), [("0.6b", 20), ("1b", 26), ("2b", 32)])
def test_p0_is_nanochat(name, depth):
    """Its rules for a depth: nanochat/scripts/base_train.py of December 2025."""
    args = read(recipes.expanded(["--recipe", f"p0-{name}", f"p0-muon-{name}"]))
    assert args.flag_problems == []
    width = 64 * depth
    shape = (args.num_layers, args.hidden_size, args.num_attention_heads)
    assert shape == (depth, width, width // 128)
    assert args.init_method_std == pytest.approx(width**-0.5, rel=1e-3)
    parameters = 12 * depth * width**2 + 2 * 65536 * width
    assert args.train_iters == 20 * parameters // 524288
    assert args.global_batch_size * args.seq_length == 524288
    assert args.output_lr == pytest.approx(0.004 * (width / 768) ** -0.5, rel=1e-3)
    assert args.embedding_lr == pytest.approx(0.2 * (width / 768) ** -0.5, rel=1e-3)
    assert (args.embedding_init_method_std, args.decoupled_lr) == (1.0, None)
    assert (args.lr, args.weight_decay, args.lr_warmup_fraction) == (0.02, 0.0, None)
    assert (args.optimizer, args.use_distributed_optimizer) == ("muon", True)
    set_decay(args)
    assert args.lr_wsd_decay_iters == round(0.2 * args.train_iters)
