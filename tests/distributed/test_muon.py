"""Muon: per parameter against its definition, over tensor-parallel ranks, and resumed."""

import importlib.util

import pytest

from tests.distributed import merging
from tests.distributed.layout import SINGLE, Layout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("emerging_optimizers") is None, reason="megasink[muon] is missing"
)
TASKS = "tests.distributed.muon_tasks"
TINY = "tests.distributed.tiny_gpt"
HEADWISE = {"attention_variant": "gated", "gate_granularity": "headwise"}
CASES = {
    "vanilla": {"attention_variant": "vanilla"},
    "sink": {},
    "k-bias": {"attention_variant": "k-bias"},
    "kv-bias": {"attention_variant": "kv-bias"},
    "headwise": HEADWISE,
    "headwise-value": HEADWISE | {"gate_position": "value"},
    "headwise-bf16": HEADWISE | {"bf16": True},
    "elementwise": {"attention_variant": "gated", "gate_granularity": "elementwise"},
    **{
        f"elementwise-{position}": {
            "attention_variant": "gated",
            "gate_granularity": "elementwise",
            "gate_position": position,
        }
        for position in ("query", "key", "value", "output")
    },
    "learned-positions": {"position_embedding_type": "learned_absolute"},
}


@pytest.mark.parametrize("name", CASES)
def test_three_steps_are_the_definition(pool, name):
    (report,) = pool.run(f"{TASKS}:against_definition", SINGLE, **CASES[name])
    errors = report["errors"]
    # float32 against float64; Newton-Schulz amplifies rounding where singular values are small.
    assert max(errors.values()) < 2e-3, sorted(errors.items(), key=lambda e: -e[1])[:3]
    rows = [n for n in report["muon"] if "linear_gate" in n]
    assert bool(rows) == (name.startswith("headwise") or name.startswith("elementwise-"))
    assert len(report["muon"]) == 2 * (4 + bool(rows))
    assert not any(report["padding"])


@pytest.mark.parametrize("mode", ["shape_scaling", "unit_rms_norm"])
def test_other_scales(pool, mode):
    (report,) = pool.run(f"{TASKS}:against_definition", SINGLE, mode=mode, **HEADWISE)
    assert max(report["errors"].values()) < 2e-3


def test_rates_of_embedding_output_and_sinks(pool):
    """Each by the definition, at rates of its own; and another one where they are left out."""
    rates = {"embedding_lr": 0.2, "output_lr": 0.004}
    (report,) = pool.run(
        f"{TASKS}:against_definition", SINGLE, rates=rates, sink_lr_mult=0.1, steps=2
    )
    assert max(report["errors"].values()) < 2e-3
    assert (
        sum("word_embeddings" in name or "output_layer" in name for name in report["errors"]) == 2
    )
    (report,) = pool.run(f"{TASKS}:against_definition", SINGLE, rates={"output_lr": 0.004}, steps=2)
    assert max(report["errors"].values()) < 2e-3


MUON = {
    "optimizer": "muon",
    "muon_nesterov": True,
    "muon_fp32_matmul_prec": "high",
    "muon_tp_mode": "duplicated",
}


@pytest.mark.parametrize("name", ["sink", "headwise", "elementwise"])
def test_two_tensor_parallel_ranks_train_as_one(pool, name):
    options = {"optimizer_options": MUON, **CASES[name]}
    one = pool.run(f"{TINY}:train", SINGLE, **options)
    two = pool.run(f"{TINY}:train", Layout(tp=2), **options)
    merging.assert_same_training(two, one, 1e-3)


def test_blockwise_depends_on_the_layout(pool):
    """Why `duplicated` is megasink's default."""
    options = {"optimizer_options": MUON | {"muon_tp_mode": "blockwise"}}
    one = pool.run(f"{TINY}:train", SINGLE, **options)
    two = pool.run(f"{TINY}:train", Layout(tp=2), **options)
    with pytest.raises(AssertionError):
        merging.assert_same_weights(two, one, 1e-3, "final")


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_resumed_to_the_bit(pool, tmp_path, bf16):
    """Momentum of query, key, value and gate rows included."""
    options = {"distributed_optimizer": False, "bf16": bf16, "folder": str(tmp_path), **HEADWISE}
    options["optimizer_options"] = MUON
    tasks = "tests.distributed.checkpoint_tasks"
    (before,) = pool.run(f"{tasks}:save_and_go_on", SINGLE, **options)
    (after,) = pool.run(f"{tasks}:load_and_go_on", SINGLE, **options)
    assert after["step"] == 2
    assert after["loss"] == before["loss"]
    merging.assert_same_weights([after], [before], 0.0, "after")
