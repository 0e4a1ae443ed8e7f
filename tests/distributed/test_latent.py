"""Latent attention with sinks and gates: against plain autograd, and in every layout.

Keys of 24, values of 16, one latent of keys and values for all heads, as Megatron's `+` layers.
"""

import shutil

import pytest

from megasink.convert.model_flags import model_flags
from tests.convert.models import OWN
from tests.convert.models_page import EXPERTS, LAYOUTS
from tests.distributed import merging
from tests.distributed.cases import CP, EP, TOLERANCE, TRAIN, case, cases
from tests.distributed.layout import SINGLE
from tests.distributed.test_oracle import compare
from tests.runs import MOCK, resumed_from, steps

MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_layer_freq": [0, 1],
    "moe_router_load_balancing_type": "none",
    "moe_router_score_function": "sigmoid",
    "moe_token_dispatcher_type": "alltoall",
}
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale_all_dim": 1.0}
LATENT = {"latent": True, "head_balance_scope": "microbatch"}
# Layouts, and options of the model: each has its own oracle, a single process.
MODELS = {
    "vanilla": ("tp pp sp+full", LATENT | {"attention_variant": "vanilla"}),
    "sink": ("sp tp pp single+selective dp+distributed", LATENT),
    "off-by-one": ("tp", LATENT | YARN | {"attention_variant": "off-by-one"}),
    "headwise": ("tp sp pp single+selective", LATENT | {"attention_variant": "gated"}),
    "elementwise": (
        "tp sp+full pp",
        LATENT | {"attention_variant": "gated", "gate_granularity": "elementwise"},
    ),
    "whole-queries": ("tp sp", LATENT | {"q_lora_rank": None}),
    "no-norms": ("sp", LATENT | {"qk_layernorm": False, "head_balance_scope": "global"}),
    "experts": ("ep tp-ep", LATENT | MOE),
}
VARIANTS = ("vanilla", "sink", "off-by-one", "headwise", "elementwise")


@pytest.fixture(scope="module")
def single(pool):
    """The report of one process for a model."""
    return lambda model: pool.once(TRAIN, SINGLE, **MODELS[model][1])


@pytest.mark.parametrize(("model", "where"), cases(MODELS))
def test_layout_changes_nothing(pool, single, model, where):
    layout, options = case(where)
    reports = pool.run(TRAIN, layout, **MODELS[model][1] | options)
    merging.assert_same_training(reports, single(model), TOLERANCE)


@pytest.mark.parametrize("model", VARIANTS)
def test_context_parallelism_changes_nothing(pool, single, model):
    found = pool.run(TRAIN, CP, cp_comm_type="all_gather", **MODELS[model][1])
    merging.assert_same_training(found, single(model), TOLERANCE)


@pytest.mark.parametrize("model", [*VARIANTS, "whole-queries"])
def test_training_equals_autograd_of_eq_7(pool, model):
    compare(pool, SINGLE, 3, MODELS[model][1])


def test_layers_with_experts_are_those_of_the_frequency(pool):
    assert EP.ep == 2
    names = merging.whole([pool.once(TRAIN, SINGLE, **MODELS["experts"][1])[0]["initial"]])
    experts = {name.split(".")[2] for name in names if ".experts." in name}
    assert experts == {"1"}  # of two blocks, or {"3"} by layers of the pattern


RUN = """
    --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --log-interval 1
    --lr-decay-style constant --head-balance-coeff 0.1 --save-interval 2 --vocab-size 100
    --moe-router-load-balancing-type none --use-distributed-optimizer
""".split()


def test_a_run_with_sinks_and_experts_resumes_in_another_layout(pool, tmp_path):
    """From one rank to TP 2 with SP and EP 2: steps 3 and 4 of the run that went on."""
    flags = [*model_flags(OWN["own-latent-sink-experts"][1]), *MOCK, *RUN]
    run, other = tmp_path / "run", tmp_path / "other"
    more = ["--train-iters", "4", "--resume", "--override-opt-param-scheduler"]
    pool.train([*flags, "--run-dir", str(run), "--train-iters", "2"])
    shutil.copytree(run, other)
    pool.train([*flags, "--run-dir", str(run), *more])
    pool.train([*flags, "--run-dir", str(other), *more, *LAYOUTS["TP 2"], *EXPERTS], 2)
    assert resumed_from(other) == [None, 2]
    whole, resumed = steps(run), steps(other)
    assert len({step["lm_loss"] for step in whole}) == len(resumed) == 4
    for one, wanted in zip(resumed[2:], whole[2:], strict=True):
        for name in ("lm_loss", "grad_norm", "balance_loss"):
            assert one[name] == pytest.approx(wanted[name], rel=1e-4), name
        assert one["lm_loss"] == pytest.approx(wanted["lm_loss"], rel=1e-5)
