"""`megasink train --optimizer muon` as P0 has it, with a headwise gate; and without the package."""

import importlib.util
import shutil
from argparse import Namespace

import pytest

from megasink.training.checks import muon
from tests import runs

FLAGS = [*runs.TINY, *runs.UNTIED, *runs.MOCK]
FLAGS += """
    --attention-variant gated --group-query-attention --num-query-groups 2 --optimizer muon
    --lr 0.02 --embedding-lr 0.2 --output-lr 0.004 --muon-scale-mode shape_scaling --muon-nesterov
    --muon-momentum 0.95 --muon-coefficient-type simple --muon-fp32-matmul-prec high
    --adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-10 --weight-decay 0 --train-iters 4
    --save-interval 2 --head-balance-coeff 0.1
""".split()


needs_package = pytest.mark.skipif(
    importlib.util.find_spec("emerging_optimizers") is None, reason="megasink[muon] is missing"
)


def resumed_at_two(finished, again):
    """A copy of a run of four steps as it was after two."""
    shutil.copytree(finished, again)
    shutil.rmtree(again / "checkpoints/iter_0000004")
    (again / "checkpoints/latest_checkpointed_iteration.txt").write_text("2")
    metrics = again / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    return again


@needs_package
def test_resumes_in_both_layouts(pool, tmp_path):
    finished = tmp_path / "finished"
    pool.train([*FLAGS, "--run-dir", str(finished)], 1)
    before = runs.steps(finished)
    assert len({line["lm_loss"] for line in before}) == 4  # it trains
    # The momentum of query, key, value and gate rows is cut anew under TP=2.
    for ranks, tolerance in ((1, 0.0), (2, 1e-4)):
        again = resumed_at_two(finished, tmp_path / str(ranks))
        layout = ["--tensor-model-parallel-size", str(ranks)]
        pool.train([*FLAGS, *layout, "--run-dir", str(again), "--resume"], ranks)
        after = runs.steps(again)
        assert [line["iteration"] for line in after] == [1, 2, 3, 4]
        assert runs.resumed_from(again) == [None, 2]
        for old, new in zip(before, after, strict=True):
            for key in ("lm_loss", "grad_norm", "balance_loss", "learning_rate"):
                assert new[key] == pytest.approx(old[key], rel=tolerance, abs=0), (ranks, key)


SHARDED = "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
KEYS = ("lm_loss", "grad_norm", "balance_loss")


@needs_package
@pytest.mark.parametrize("variant", ["gated", "k-bias"])
def test_matrices_sharded_over_replicas(pool, tmp_path, variant):
    """As if each replica had the whole optimizer; resumed to the bit, and by one replica."""
    flags = [*FLAGS, "--attention-variant", variant, "--global-batch-size", "8", "--bf16"]
    flags += ["--clip-grad", "0"]  # its norm is a sum in another order: rounding
    plain, sharded = tmp_path / "plain", tmp_path / "sharded"
    pool.train([*flags, "--run-dir", str(plain)], 2)
    pool.train([*flags, *SHARDED, "--run-dir", str(sharded)], 2)
    before = runs.steps(sharded)
    assert len({line["lm_loss"] for line in before}) == 4
    for one, other in zip(runs.steps(plain), before, strict=True):
        assert (other["lm_loss"], other["balance_loss"]) == (one["lm_loss"], one["balance_loss"])
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-6)
    if variant != "gated":
        return
    for ranks, tolerance in ((2, 0.0), (1, 5e-3)):
        again = resumed_at_two(sharded, tmp_path / str(ranks))
        pool.train([*flags, *SHARDED, "--run-dir", str(again), "--resume"], ranks)
        assert runs.resumed_from(again) == [None, 2]
        for old, new in zip(before, runs.steps(again), strict=True):
            for key in KEYS:
                assert new[key] == pytest.approx(old[key], rel=tolerance, abs=0), (ranks, key)


@pytest.mark.parametrize("installed", [False, True])
def test_a_missing_package_is_named_before_anything_starts(monkeypatch, installed):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    args = Namespace(
        optimizer="muon",
        fp16=False,
        use_distributed_optimizer=False,
        group_query_attention=False,
        num_attention_heads=4,
        tensor_model_parallel_size=1,
        muon_split_qkv=True,
    )
    wanted = [] if installed else ["--optimizer muon needs a package: pip install 'megasink[muon]'"]
    assert list(muon.problems(args)) == wanted
