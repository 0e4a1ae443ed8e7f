"""Options of Megatron that change attention or layers, with sink attention (docs/features.md)."""

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.cases import PP, SP, TOLERANCE, TP_SP, TRAIN
from tests.distributed.layout import SINGLE
from tests.distributed.test_resume import FLAGS, TP
from tests.runs import metrics

ORACLE = "tests.distributed.oracle:train"
OPTIONS = {
    "qk-l2-norm": {"qk_l2_norm": True},
    "no-rope": {"no_rope_freq": 2},
    "interleaved-rope": {"rotary_interleaved": True},
    "mup": {"use_mup": True, "mup_base_hidden_size": 16, "mup_base_head_dim": 64.0},
    "qkv-bias": {"add_qkv_bias": True},
    "wide-heads": {"kv_channels": 32},
    "nanochat": {
        "norm_without_gain": True,
        "embedding_norm": True,
        "logit_softcap": 1.5,
        "qk_l2_norm": True,
    },
    "softmax-fp32": {"attention_softmax_in_fp32": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_training_equals_autograd_and_does_not_depend_on_the_layout(pool, name):
    options = OPTIONS[name]
    wanted = pool.run(ORACLE, SINGLE, coeff=1.0, steps=1, **options)
    found = pool.run(TRAIN, TP_SP, steps=1, **options, **SP)
    np.testing.assert_allclose(merging.loss(found), merging.loss(wanted), rtol=TOLERANCE)
    merging.assert_same_gradients(found, wanted, TOLERANCE)


def test_the_options_change_the_model(pool):
    """Otherwise the comparison above would hold for an option that nobody reads."""
    losses = {
        name: merging.loss(pool.run(TRAIN, SINGLE, steps=1, **options))[0]
        for name, options in OPTIONS.items()
    }
    plain = merging.loss(pool.run(TRAIN, SINGLE, steps=1))[0]
    same = [name for name, loss in losses.items() if abs(loss / plain - 1) < 1e-4]
    # The kernels sum in float32 anyway; biases start at 0.
    assert same == ["qkv-bias", "softmax-fp32"]


def test_stages_of_different_sizes(pool):
    options = {"num_layers": 3, "steps": 1}
    found = pool.run(TRAIN, PP, num_layers_in_first_pipeline_stage=1, **options)
    merging.assert_same_training(found, pool.run(TRAIN, SINGLE, **options), TOLERANCE)


def test_deterministic_mode_runs_twice_the_same_to_the_bit(pool, tmp_path):
    lines = []
    for name in "ab":
        flags = [*FLAGS, *TP, "--deterministic-mode", "--train-iters", "3", "--run-dir"]
        pool.train([*flags, str(tmp_path / name)], 2)
        keys = ("iteration", "lm_loss", "grad_norm", "importance", "balance_loss")
        lines.append([{k: line.get(k) for k in keys} for line in metrics(tmp_path / name)])
    assert lines[0] == lines[1]
    assert len({line["lm_loss"] for line in lines[0] if line["lm_loss"]}) == 3
