"""Learning rate and weight decay of sink parameters, and of vectors, in Megatron's groups."""

import pytest

from tests.distributed.layout import Layout

TASK = "tests.training.tasks:groups_of_the_trainer"
LAYERS, HEADS, HEAD_DIM, VOCABULARY = 2, 4, 16, 128


def groups(pool, layout=None, **options):
    reports = pool.run(TASK, layout or Layout(), **options)
    return reports[0] if len(reports) == 1 else reports


@pytest.mark.parametrize(
    ("options", "elements"),
    [
        ({}, LAYERS * HEADS),
        ({"attention_variant": "k-bias"}, LAYERS * HEADS * HEAD_DIM),
        ({"attention_variant": "kv-bias", "bias_shared_heads": True}, LAYERS * 2 * HEAD_DIM),
        ({"attention_variant": "kv-bias", "bf16": True}, LAYERS * 2 * HEADS * HEAD_DIM),
    ],
    ids=["sink", "k-bias", "kv-bias-shared", "kv-bias-bf16"],
)
def test_sink_parameters_have_a_group_of_their_own(pool, options, elements):
    found = groups(pool, distributed=False, lr_mult=5.0, weight_decay=0.3, **options)
    (sinks,) = [g for g in found if g["weight_decay"] == 0.3]
    assert sinks["elements"] == elements
    assert sinks["highest"] == pytest.approx(5e-3)
    assert sinks["last"] == pytest.approx(5e-4)
    assert sinks["dtypes"] == ["torch.float32"]
    assert not sinks["logged"]  # Megatron logs the learning rate of the others
    others = [g for g in found if g is not sinks]
    assert sorted(g["weight_decay"] for g in others) == [0.0, 0.1]
    for group in others:
        assert group["highest"] == pytest.approx(1e-3)
        assert group["last"] == pytest.approx(1e-4)
        assert group["logged"]


def test_the_distributed_optimizer_has_the_group_too(pool):
    ranks = groups(
        pool,
        Layout(dp=2),
        distributed=True,
        lr_mult=5.0,
        weight_decay=0.3,
        attention_variant="k-bias",
    )
    sinks = [next(g for g in rank if g["weight_decay"] == 0.3) for rank in ranks]
    assert sum(g["elements"] for g in sinks) == LAYERS * HEADS * HEAD_DIM
    assert all(g["highest"] == pytest.approx(5e-3) for g in sinks)


@pytest.mark.parametrize("variant", ["sink", "kv-bias"])
def test_by_default_they_are_vectors_like_the_others(pool, variant):
    """No decay, no group more: checkpoints from before the options load."""
    found = groups(
        pool, distributed=False, lr_mult=1.0, weight_decay=0.0, attention_variant=variant
    )
    assert sorted(g["weight_decay"] for g in found) == [0.0, 0.1]
    vectors = next(g for g in found if g["weight_decay"] == 0.0)
    norms = 5 * 64
    assert vectors["elements"] == norms + vectors["elements_of_sinks"]


@pytest.mark.parametrize(("lr_mult", "weight_decay"), [(2.0, 0.0), (1.0, 0.2)])
def test_one_without_the_other(pool, lr_mult, weight_decay):
    found = groups(pool, distributed=False, lr_mult=lr_mult, weight_decay=weight_decay)
    small = min(found, key=lambda g: g["elements"])
    assert small["elements"] == LAYERS * HEADS
    assert small["weight_decay"] == weight_decay
    assert small["highest"] == pytest.approx(lr_mult * 1e-3)


def test_all_other_parameters_may_decay(pool):
    """P2.17: norms like matrices, and one group for both; sinks by their own flag."""
    found = groups(pool, distributed=False, lr_mult=1.0, weight_decay=0.0, decay_all=True)
    sinks, rest = sorted(found, key=lambda g: g["elements"])
    assert sinks["elements"] == LAYERS * HEADS
    assert (sinks["weight_decay"], rest["weight_decay"]) == (0.0, 0.1)


@pytest.mark.parametrize("pp", [1, 2])
def test_both_ends_have_rates_of_their_own(pool, pp):
    """On the ranks that have them; they fall in the same proportion as the others."""
    rates = {"embedding_lr": 0.2, "output_lr": 0.004}
    ranks = pool.run(TASK, Layout(pp=pp), distributed=False, lr_mult=1.0, weight_decay=0.0, **rates)
    found = [group for rank in ranks for group in rank if group["elements"]]
    for rate in rates.values():
        (end,) = [group for group in found if group["highest"] == pytest.approx(rate)]
        assert end["elements"] == VOCABULARY * HEADS * HEAD_DIM
        assert end["last"] == pytest.approx(0.1 * rate)
        assert (end["weight_decay"], end["logged"]) == (0.1, False)
    assert all(g["highest"] == pytest.approx(1e-3) for g in found if g["logged"])
