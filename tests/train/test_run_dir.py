"""Which run may go on from which checkpoint."""

import dataclasses
import json

import pytest

from megasink import config, gate_options
from megasink.checkpoint.identity import MODEL
from megasink.parser import parse_apart
from megasink.train import run_dir
from tests.train.command_lines import MOCK

FLAGS = [*MOCK, "--attention-variant", "sink"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run folder with a finished checkpoint, as far as flags are concerned."""
    run = tmp_path_factory.mktemp("run")
    checkpoint = run / "checkpoints" / "iter_0000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text("{}")
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    args = parse_apart([*FLAGS, "--run-dir", str(run)])
    args.world_size = 1
    run_dir.write_start(args, run_dir.identity_of(args))
    return run


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--attention-variant gated", "attention_variant 'sink' -> 'gated'"),
        ("--attention-bias-type alibi", "attention_bias_type 'none' -> 'alibi'"),
        ("--residual-clip 100", "residual_clip None -> 100.0"),
        ("--prefix-lm-tokens 4", "prefix_lm_tokens 0 -> 4"),
        ("--multi-head-addition", "multi_head_addition False -> True"),
        ("--ffn-activation relu", "ffn_activation None -> 'relu'"),
        ("--num-experts 4", "num_experts None -> 4"),
        ("--moe-router-topk 3", "moe_router_topk 2 -> 3"),
        ("--num-query-groups 2 --group-query-attention", "num_query_groups 1 -> 2"),
        ("--apply-layernorm-1p", "layernorm_zero_centered_gamma False -> True"),
    ],
)
@pytest.mark.parametrize("finetune", [[], ["--finetune"]])
def test_weights_of_another_model_are_refused(saved, flags, name, finetune):
    args = parse_apart([*FLAGS, "--load", str(saved / "checkpoints"), *finetune, *flags.split()])
    (problem,) = run_dir.problems(args)
    assert "is a checkpoint of another model: " in problem
    assert name in problem


def test_a_longer_context_needs_finetune(saved):
    longer = "--seq-length 4096 --max-position-embeddings 4096 --rotary-base 1000000".split()
    load = [*FLAGS, "--load", str(saved / "checkpoints"), *longer]
    (problem,) = run_dir.problems(parse_apart(load))
    assert "rotary_base 10000 -> 1000000" in problem
    assert problem.endswith("(another context goes with --finetune)")
    assert run_dir.problems(parse_apart([*load, "--finetune"])) == []
    other = [*load, "--finetune", "--position-embedding-type", "learned_absolute"]
    assert "position_embedding_type" in run_dir.problems(parse_apart(other))[0]


def test_resuming_another_model_is_refused(saved):
    args = parse_apart([*FLAGS, "--run-dir", str(saved), "--resume", "--residual-clip", "100"])
    (problem,) = run_dir.problems(args)
    assert "holds a run of another configuration (residual_clip None -> 100.0)" in problem


def test_every_option_of_a_model_is_one_by_which_it_is_known():
    of_training = {
        *(entry.name for entry in dataclasses.fields(config.HeadBalanceOptions)),
        *(entry.name for entry in dataclasses.fields(config.ObservingOptions)),
        *(entry.name for entry in dataclasses.fields(config.RunOptions)),
        "attention_kernel",
        "sink_lr_mult",
        "sink_weight_decay",
    }
    options = {
        entry.name
        for module in (config, gate_options)
        for kind in vars(module).values()
        if dataclasses.is_dataclass(kind) and kind.__name__.endswith("Options")
        for entry in dataclasses.fields(kind)
    }
    assert options - of_training <= set(MODEL)
    known = vars(parse_apart(FLAGS))
    assert [name for name in MODEL if name not in known] == []
    json.dumps([known[name] for name in MODEL])
