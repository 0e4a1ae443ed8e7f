"""The trainer turns GPT's flags into a hybrid pattern, and counts by blocks."""

import re

import pytest

from megasink.megatron.hybrid_pattern import blocks_of
from tests.distributed.layout import SINGLE
from tests.distributed.pool import free_port
from tests.runs import MOCK, TINY, UNTIED

EXPERTS = """--num-layers 4 --num-experts 4 --moe-router-topk 2 --moe-layer-freq ([0]*2+[1]*2)
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --disable-bias-linear
    --seq-length 64 --max-position-embeddings 64 --train-iters 2 --lr 1e-2 --eval-iters 0
    --log-interval 1 --log-throughput""".split()
STAGES = ["--pipeline-model-parallel-size", "2"]
PATTERNS = {
    "*-*-*-*-": {},
    "*-*-|*-*-": {"pipeline_model_parallel_size": 2},
    "*-|*-*-*-": {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
    "*-|*-|*-|*-": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
    "|*-*-*-*-": {
        "pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": [["embedding"], [*["decoder"] * 4, "loss"]],
    },
    "*E*-*E*-/*-/*-": {"num_moe_experts": 4, "moe_layer_freq": 2, "mtp_num_layers": 2},
}


def test_experts_in_some_stages_report_the_losses_of_one_process(pool, tmp_path):
    """Ranks without experts count their losses as the others do."""
    lines = {}
    for ranks, more in ((1, []), (2, STAGES)):
        flags = [*TINY, *UNTIED, *MOCK, *EXPERTS, *more, "--run-dir", str(tmp_path / str(ranks))]
        reports = pool.run(
            "tests.training.hybrid_model_tasks:printed", flags=flags, ranks=ranks, port=free_port()
        )
        texts = [report["text"] for report in reports]
        assert not [line for line in reports[0]["deprecations"] if "GPTModel" in line]
        pattern = "*-*-|*E*E" if ranks == 2 else "*-*-*E*E"
        assert f"layers: --hybrid-layer-pattern '{pattern}'" in texts[0]
        found = re.findall(r"(lm loss|load_balancing_loss): (\S+)", texts[ranks - 1])
        assert {name for name, _ in found} == {"lm loss", "load_balancing_loss"}
        lines[ranks] = [float(value) for _, value in found]
    assert len(lines[1]) == len(lines[2]) == 4
    assert lines[1] == pytest.approx(lines[2], rel=1e-5)


def test_flags_of_a_gpt_model_become_a_pattern(pool):
    for wanted, options in PATTERNS.items():
        (found,) = pool.run(
            "tests.training.hybrid_model_tasks:pattern", SINGLE, num_layers=4, **options
        )
        assert found == wanted
        assert len(blocks_of(found)) == 4


def test_flags_by_layer_of_a_pattern_become_those_of_blocks(pool):
    flags = {"window_attn_skip_freq": 2, "no_rope_freq": [1, 0, 0, 1, 1], "cp_comm_type": ["a2a"]}
    (found,) = pool.run(
        "tests.training.hybrid_model_tasks:by_block", SINGLE, pattern="*-*|*-", flags=flags
    )
    assert (found["num_layers"], found["hybrid_layer_pattern"]) == (3, None)
    # Layers 1, 3 and 4 of the pattern have attention; every second layer has no window.
    assert found["window_attn_skip_freq"] == [1, 1, 0]
    assert found["no_rope_freq"] == [1, 0, 1]
    assert found["cp_comm_type"] == ["a2a"]
