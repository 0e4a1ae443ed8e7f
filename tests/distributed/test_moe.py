"""MoE layers with sink attention: against plain autograd, layouts, checkpoints.

Megatron's own router losses and our head-balance loss are on together: each must arrive once.
Not covered: grouped GEMM and DeepEP, which need CUDA.
"""

import json

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.layout import SINGLE, Layout
from tests.distributed.pool import Pool
from tests.distributed.test_layouts import FULL, SP, TOLERANCE, compare, name_of
from tests.distributed.test_resume import FLAGS

TRAIN = "tests.distributed.tiny_gpt:train"
ORACLE = "tests.layers.block_oracle:train_once"
CHECKPOINT = "tests.distributed.checkpoint_tasks"
EP, TP_SP, PP = Layout(dp=2, ep=2), Layout(tp=2, sp=True), Layout(pp=2)
TP_EP = Layout(tp=2, sp=True, ep=2, etp=1)
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
DISTRIBUTED = {"distributed_optimizer": True}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "allgather",
}
# In the scope of one microbatch the balance loss has its gradient from the first step on.
FIRST_STEP = {"steps": 1, "head_balance_scope": "microbatch"}
MODELS = {
    "moe": MOE,
    "shared": MOE | {"moe_shared_expert_intermediate_size": 32},
    "every-second": MOE | {"moe_layer_freq": 2},
    "sandwich-reglu": MOE | {"sandwich_norm": True, "ffn_activation": "reglu"},
    "global-loss": MOE | {"moe_router_load_balancing_type": "global_aux_loss"},
    "expert-bias": MOE
    | {
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
    },
    "per-token-loss": MOE | {"calculate_per_token_loss": True},
}
CASES = [
    ("moe", EP, {}),
    ("moe", EP, ALLTOALL | DISTRIBUTED | {"overlap": True}),
    ("moe", PP, ALLTOALL | FULL),
    ("moe", EP, {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}),
    ("moe", TP_SP, SP),
    ("moe", TP_EP, SP | ALLTOALL),
    ("shared", EP, ALLTOALL),
    ("shared", TP_EP, SP),
    ("every-second", PP, {}),
    ("every-second", EP, {}),
    ("sandwich-reglu", TP_SP, SP | ALLTOALL),
    ("expert-bias", EP, {}),
    ("global-loss", PP, {}),
    ("per-token-loss", EP, {}),
]


@pytest.fixture(scope="module")
def single(pool):
    """The report of one process for a model."""
    return lambda model: pool.once(TRAIN, SINGLE, **MODELS[model])


@pytest.mark.parametrize(("model", "layout", "options"), CASES, ids=name_of)
def test_layout_changes_nothing(pool, single, model, layout, options):
    compare(pool.run(TRAIN, layout, **MODELS[model] | options), single(model))


@pytest.mark.parametrize("model", ["moe", "shared", "every-second"])
def test_gradients_equal_autograd_of_all_losses(pool, model):
    (wanted,) = pool.run(ORACLE, SINGLE, balance=1.0, **MODELS[model])
    (found,) = pool.run(TRAIN, SINGLE, **FIRST_STEP, **MODELS[model])
    found = merging.whole([found["gradients"]])
    wanted = merging.whole([wanted["gradients"]])
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert merging.relative_error(found[name], wanted[name]) <= TOLERANCE, name


def test_every_loss_matters_for_what_is_compared(pool):
    (wanted,) = pool.run(ORACLE, SINGLE, balance=1.0, **MODELS["moe"])
    wanted = merging.whole([wanted["gradients"]])
    for change in (
        {"balance": 0.9},
        {"moe_aux_loss_coeff": 0.09},
        {"moe_z_loss_coeff": 0.009},
    ):
        (other,) = pool.run(ORACLE, SINGLE, **{"balance": 1.0, **MODELS["moe"]} | change)
        other = merging.whole([other["gradients"]])
        worst = max(merging.relative_error(other[name], wanted[name]) for name in wanted)
        assert worst > 100 * TOLERANCE, change


@pytest.mark.parametrize("layout", [SINGLE, EP], ids=str)
def test_a_loss_scale_multiplies_every_gradient(pool, layout):
    (plain,) = pool.run(TRAIN, SINGLE, **FIRST_STEP, **MODELS["moe"])
    reports = pool.run(TRAIN, layout, grad_scale=1024.0, **FIRST_STEP, **MODELS["moe"])
    found = merging.whole([r["gradients"] for r in reports])
    for name, wanted in merging.whole([plain["gradients"]]).items():
        assert merging.relative_error(found[name] / 1024.0, wanted) <= TOLERANCE, name


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (EP, SINGLE, "distributed"),
        (EP, SINGLE, "plain"),
        (EP, SINGLE, "bf16"),
        (SINGLE, EP, "distributed"),
        (SINGLE, EP, "bf16"),
        (EP, TP_EP, "plain"),
    ],
    ids=str,
)
def test_a_checkpoint_loads_under_other_expert_parallelism(pool, tmp_path, first, second, kind):
    options = {"distributed_optimizer": kind == "distributed", "bf16": kind == "bf16"}
    options |= {"folder": str(tmp_path), **MODELS["shared"]}
    before = pool.run(f"{CHECKPOINT}:save_and_go_on", first, **options)
    options |= SP if second.sp else {}
    after = pool.run(f"{CHECKPOINT}:load_and_go_on", second, **options)
    tolerance = 1e-2 if kind == "bf16" else TOLERANCE
    found, wanted = (merging.whole([r["saved"]["weights"] for r in rs]) for rs in (after, before))
    assert found.keys() == wanted.keys()
    assert sum(".experts.local_experts." in name for name in found) == 2 * 4 * 2
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    # The next step shows that the states of the optimizer came along.
    np.testing.assert_allclose(merging.loss(after), merging.loss(before), rtol=tolerance)
    found, wanted = (merging.whole([r["after"] for r in rs]) for rs in (after, before))
    for name in wanted:
        assert merging.relative_error(found[name], wanted[name]) <= tolerance, name


@pytest.fixture
def fresh_pool():
    """Workers of its own: the trainer keeps state for its process, data sets of other tests too."""
    with Pool(2) as workers:
        yield workers


def test_the_trainer_runs_with_expert_parallelism(fresh_pool, tmp_path):
    flags = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.01
    --moe-z-loss-coeff 0.001 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2
    --train-iters 3
    """.split()
    fresh_pool.train([*FLAGS, *flags, "--run-dir", str(tmp_path / "run")], 2)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["lm_loss"] for line in map(json.loads, lines) if "lm_loss" in line]
    assert len(losses) == 3
    assert np.isfinite(losses).all()
