"""The options of the block equal their definitions. Layouts: tests/distributed."""

import pytest

from tests.distributed.layout import SINGLE

ERRORS = "tests.megatron.block_oracle:errors"
# Its norm of queries and keys is after RoPE, Megatron's before: without a gain both are the same.
NANOCHAT = {
    "norm_without_gain": True,
    "embedding_norm": True,
    "logit_softcap": 1.5,
    "qk_l2_norm": True,
    "ffn_activation": "relu",
}
OPTIONS = {
    "none": {},
    "sandwich": {"sandwich_norm": True},
    "clip": {"residual_clip": 0.5},
    "post-norm": {"post_norm": True},
    "post-norm-clip": {"post_norm": True, "residual_clip": 0.5},
    "multi-head-addition": {"multi_head_addition": True},
    "gainless": {"norm_without_gain": True},
    "gainless-sandwich": {"norm_without_gain": True, "sandwich_norm": True},
    "embedding-norm": {"embedding_norm": True},
    "soft-cap": {"logit_softcap": 1.5},
    "nanochat": NANOCHAT,
    "sandwich-addition": {"sandwich_norm": True, "multi_head_addition": True},
} | {
    name: {"ffn_activation": name} for name in ("relu", "gelu", "silu", "reglu", "geglu", "swiglu")
}


WITH_BIASES = ("sandwich", "clip", "post-norm", "multi-head-addition", "relu")


@pytest.mark.parametrize(
    ("name", "biases"), [(n, False) for n in OPTIONS] + [(n, True) for n in WITH_BIASES]
)
def test_loss_and_gradients_equal_the_definition(pool, name, biases):
    (errors,) = pool.run(ERRORS, SINGLE, options=OPTIONS[name], biases=biases)
    # The gradient of a sink is a sum over all tokens that nearly cancels: 1e-5 is rounding there.
    plain = max(1e-5, *(error for _, error in errors.values()))
    for tensor, (error, _) in errors.items():
        assert error <= 2 * plain, f"{tensor}: {error:.2e}, plainly at most {plain:.2e}"
    assert plain < 1e-4


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({"sandwich_norm": True}, {}),
        ({"residual_clip": 0.5}, {"residual_clip": 0.6}),
        ({"embedding_norm": True}, {}),
        ({"logit_softcap": 1.5}, {"logit_softcap": 1.6}),
        ({"qk_l2_norm": True}, {}),
        ({"ffn_activation": "gelu"}, {"ffn_activation": "silu"}),
        ({"ffn_activation": "reglu"}, {"ffn_activation": "geglu"}),
    ],
)
def test_the_definition_notices_other_options(pool, options, other):
    (errors,) = pool.run(ERRORS, SINGLE, options=options, other=other)
    assert errors["loss"][0] > 1e-4


def test_transformer_engine_layers(pool):
    """Its linear layers hold the norm before them: post-norm takes the ones without."""
    task = "tests.megatron.layer_tasks:transformer_engine_spec"
    (plain,) = pool.run(task, SINGLE)
    assert plain["final"] == ["TorchNorm"]
    assert plain["dense"][:3] == [
        "IdentityOp",
        "TELayerNormColumnParallelLinear",
        "TERowParallelLinear",
    ]
    assert plain["dense"][3:] == [
        "get_bias_dropout_add",
        "IdentityOp",
        "TELayerNormColumnParallelLinear",
        "get_bias_dropout_add",
    ]
    (post,) = pool.run(task, SINGLE, post_norm=True, multi_head_addition=True)
    attention = ["IdentityOp", "TEColumnParallelLinear", "HeadSumProjection", "ResidualAdd"]
    assert post == {
        "final": [],
        "dense": [*attention, "IdentityOp", "TEColumnParallelLinear", "ResidualAdd"],
        "moe": [*attention, "IdentityOp", "ResidualAdd"],
    }
    (sandwich,) = pool.run(task, SINGLE, sandwich_norm=True)
    assert sandwich["final"] == plain["final"]
    assert [n for n in sandwich["dense"] if n != "ResidualAdd"] == [
        n for n in plain["dense"] if n != "get_bias_dropout_add"
    ]
    (gainless,) = pool.run(task, SINGLE, norm_without_gain=True)
    norms = "GainlessRMSNorm"
    assert gainless == {
        "final": [norms],
        "dense": [
            *(norms, "TEColumnParallelLinear", "TERowParallelLinear", "get_bias_dropout_add"),
            *(norms, "TEColumnParallelLinear", "get_bias_dropout_add"),
        ],
        "moe": [
            *(norms, "TEColumnParallelLinear", "TERowParallelLinear", "get_bias_dropout_add"),
            *(norms, "get_bias_dropout_add"),
        ],
    }
