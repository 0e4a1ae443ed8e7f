"""MoE layers with sink attention: against plain autograd, layouts, checkpoints.

Megatron's own router losses and our head-balance loss are on together: each must arrive once.
Not covered: grouped GEMM and DeepEP, which need CUDA.
"""

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.cases import EP, TOLERANCE, TRAIN, case, cases
from tests.distributed.layout import SINGLE
from tests.distributed.pool import Pool
from tests.distributed.test_resume import FLAGS
from tests.runs import steps

ORACLE = "tests.megatron.block_oracle:train_once"
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "allgather",
}
# GPT-OSS: a clamped unit whose second factor is up + 1, and biases of router and experts.
BIASES = {
    "add_bias_linear": True,
    "quick_geglu": True,
    "activation_func_clamp_value": 1.0,
    "glu_linear_offset": 1.0,
}
# In the scope of one microbatch the balance loss has its gradient from the first step on.
FIRST_STEP = {"steps": 1, "head_balance_scope": "microbatch"}
# Layouts, and options of the model.
MODELS = {
    "moe": (
        "ep ep+alltoall+distributed+overlap ep+selective-moe pp+alltoall+full sp tp-ep+alltoall",
        MOE,
    ),
    "shared": ("ep+alltoall tp-ep", MOE | {"moe_shared_expert_intermediate_size": 32}),
    "every-second": ("ep pp", MOE | {"moe_layer_freq": 2}),
    "sandwich-reglu": ("sp+alltoall", MOE | {"sandwich_norm": True, "ffn_activation": "reglu"}),
    "global-loss": ("pp", MOE | {"moe_router_load_balancing_type": "global_aux_loss"}),
    "sequence-loss": ("ep sp pp", MOE | {"moe_router_load_balancing_type": "seq_aux_loss"}),
    "expert-bias": (
        "ep",
        MOE
        | {
            "moe_router_load_balancing_type": "none",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.05,
        },
    ),
    "biases": ("ep+alltoall tp-ep pp", MOE | BIASES),
    "per-token-loss": ("ep", MOE | {"calculate_per_token_loss": True}),
}


@pytest.mark.parametrize(("model", "where"), cases(MODELS))
def test_layout_changes_nothing(pool, model, where):
    (layout, options), of_model = case(where), MODELS[model][1]
    single = pool.once(TRAIN, SINGLE, **of_model)
    found = pool.run(TRAIN, layout, **of_model | options)
    merging.assert_same_training(found, single, TOLERANCE)


@pytest.mark.parametrize("model", ["moe", "shared", "every-second", "biases"])
def test_gradients_equal_autograd_of_all_losses(pool, model):
    wanted = pool.once(ORACLE, SINGLE, balance=1.0, **MODELS[model][1])
    found = pool.once(TRAIN, SINGLE, **FIRST_STEP, **MODELS[model][1])
    merging.assert_same_gradients(found, wanted, TOLERANCE)


def test_every_loss_matters_for_what_is_compared(pool):
    (wanted,) = pool.once(ORACLE, SINGLE, balance=1.0, **MOE)
    wanted = merging.whole([wanted["gradients"]])
    for change in ({"balance": 0.9}, {"moe_aux_loss_coeff": 0.09}, {"moe_z_loss_coeff": 0.009}):
        (other,) = pool.run(ORACLE, SINGLE, **{"balance": 1.0, **MOE} | change)
        other = merging.whole([other["gradients"]])
        worst = max(merging.relative_error(other[name], wanted[name]) for name in wanted)
        assert worst > 100 * TOLERANCE, change


@pytest.mark.parametrize("layout", [SINGLE, EP], ids=str)
def test_a_loss_scale_multiplies_every_gradient(pool, layout):
    plain = pool.once(TRAIN, SINGLE, **FIRST_STEP, **MOE)
    found = pool.run(TRAIN, layout, grad_scale=1024.0, **FIRST_STEP, **MOE)
    merging.assert_same_gradients(found, plain, TOLERANCE, scale=1024.0)


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
    losses = [line["lm_loss"] for line in steps(tmp_path / "run")]
    assert len(losses) == 3
    assert np.isfinite(losses).all()


@pytest.mark.parametrize(
    "more",
    [[], pytest.param(["--calculate-per-token-loss"], marks=pytest.mark.later)],
    ids=["mean", "per-token"],
)
def test_the_global_loss_does_not_depend_on_the_number_of_replicas(tmp_path, more):
    """The same global batch in one microbatch a rank: losses and gradient norms are the same."""
    flags = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48
    --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 3 --train-iters 3
    --global-batch-size 4
    """.split()
    found = {}
    for ranks in (1, 2, 4):
        with Pool(ranks) as workers:
            run = ["--micro-batch-size", str(4 // ranks), "--run-dir", str(tmp_path / str(ranks))]
            workers.train([*FLAGS, *flags, *more, *run], ranks)
        found[ranks] = steps(tmp_path / str(ranks))
    for key in ("lm_loss", "grad_norm"):
        wanted = [line[key] for line in found[1]]
        for ranks in (2, 4):
            assert [line[key] for line in found[ranks]] == pytest.approx(wanted, rel=1e-5), key
