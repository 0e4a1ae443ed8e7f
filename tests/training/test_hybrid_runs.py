"""Runs of hybrid models: rows by block, and checkpoints of GPT models that go on as hybrids."""

import shutil

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasink.megatron.hybrid_pattern import pattern_of
from tests.runs import MOCK, TINY, UNTIED, metrics, steps

FLAGS = [*TINY, *UNTIED, *MOCK, "--head-balance-coeff", "0.1"]
FLAGS += ["--train-iters", "4", "--save-interval", "2"]
LAYERS = FLAGS.index("--num-layers")
HYBRID = [*FLAGS[:LAYERS], *FLAGS[LAYERS + 2 :]]
DELTA_NET = """
    --device cpu --linear-num-key-heads 2 --linear-num-value-heads 4
    --linear-key-head-dim 8 --linear-value-head-dim 8
""".split()
DISTRIBUTED = ["--use-distributed-optimizer"]
EXPERTS = ["--num-experts", "4", "--moe-ffn-hidden-size", "48", "--moe-router-topk", "2"]
# Options, those of the GPT model alone, and a pattern in another layout.
MODELS = {
    "plain": ([], [], ("*-|*-", ["--pipeline-model-parallel-size", "2"])),
    "distributed": (
        [*DISTRIBUTED, "--attention-variant", "gated", "--bf16"],
        [],
        ("*-*-", ["--tensor-model-parallel-size", "2"]),
    ),
    "plain-bf16": (["--bf16"], [], None),
    "experts": ([*DISTRIBUTED, *EXPERTS], [], None),
    # Its layers have numbers in the checkpoint.
    "mixed": ([*DISTRIBUTED, *EXPERTS], ["--moe-layer-freq", "[0,1]"], None),
}


def numbers(run):
    return [
        {k: line[k] for k in ("iteration", "lm_loss", "grad_norm", "balance_loss", "importance")}
        for line in steps(run)
    ]


def test_rows_are_the_blocks_that_have_heads(pool, tmp_path):
    """Block 0 has delta-net, block 2 no mixer."""
    run = tmp_path / "run"
    flags = [
        "--hybrid-layer-pattern",
        "G-*--*",
        *DELTA_NET,
        "--log-sink-rate",
        "--seq-length",
        "64",
    ]
    flags += ["--max-position-embeddings", "64"]
    pool.train([*HYBRID, "--run-dir", str(run), *flags])
    lines = metrics(run)
    for line in lines:
        of_layers = {k for k in line if k.endswith("_per_layer")} | {"importance"} & line.keys()
        assert line.get("layers") == ([1, 3] if of_layers else None)
        assert all(len(line[key]) == 2 and None not in line[key] for key in of_layers)
    assert {"importance", "softmax_offset"} <= lines[1].keys()
    assert any("valid_sink_rate_slot_per_layer" in line for line in lines)
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    tags = {tag for tag in events.Tags()["scalars"] if " by layer/" in tag}
    assert {tag.rpartition("/")[2] for tag in tags} == {"1", "3"}


@pytest.mark.parametrize("name", MODELS)
def test_a_gpt_checkpoint_goes_on_as_a_hybrid(pool, tmp_path, name):
    """To the bit under the same layout: losses, statistics, gradient norms."""
    options, of_gpt, other = MODELS[name]
    gpt = tmp_path / "gpt"
    flags = [*FLAGS, *options, *of_gpt]
    pool.train([*flags, "--run-dir", str(gpt)], gpt=True)
    load = ["--load", str(gpt / "checkpoints"), "--ckpt-step", "2"]
    run = tmp_path / "hybrid"
    pool.train([*flags, *load, "--run-dir", str(run)])
    wanted = numbers(gpt)[2:]
    assert numbers(run) == wanted
    assert wanted[0]["lm_loss"] != wanted[1]["lm_loss"]
    if other is None:
        return
    pattern, layout = other
    run = tmp_path / "other"
    flags = [
        *HYBRID,
        *options,
        *load,
        *layout,
        "--run-dir",
        str(run),
        "--hybrid-layer-pattern",
        pattern,
    ]
    pool.train(flags, ranks=2)
    tolerance = 1e-2 if "--bf16" in options else 1e-5
    losses = [[line["lm_loss"] for line in lines] for lines in (numbers(run), wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


def test_a_checkpoint_with_other_layers_is_refused_in_one_line(pool, tmp_path):
    gpt = tmp_path / "gpt"
    pool.train([*FLAGS, "--run-dir", str(gpt)], gpt=True)
    flags = [*HYBRID, "--run-dir", str(tmp_path / "run"), "--hybrid-layer-pattern", "*-"]
    with pytest.raises(Exception, match=r"hybrid_layer_pattern '\*-\*-' -> '\*-'"):
        pool.train([*flags, "--load", str(gpt / "checkpoints")])
    # Megatron's own have no config.json.
    shutil.copytree(gpt / "checkpoints", tmp_path / "theirs")
    with pytest.raises(Exception, match=r"'\*-' pairs with a GPT checkpoint of 1 layers, .*=2"):
        pool.train([*flags, "--load", str(tmp_path / "theirs")])


def test_patterns_of_gpt_models():
    assert pattern_of({"num_layers": 3}) == "*-*-*-"
    experts = {"num_layers": 3, "num_experts": 4}
    assert pattern_of(experts) == "*E*E*E"
    assert pattern_of({**experts, "moe_layer_freq": 2}) == "*E*-*E"
    for every in ([0, 1, 1], "[0]+[1]*2"):
        assert pattern_of({**experts, "moe_layer_freq": every}) == "*-*E*E"
    assert pattern_of({**experts, "hybrid_layer_pattern": "*-|M/*"}) == "*-M"
