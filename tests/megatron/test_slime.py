"""slime: its model provider and training step with our spec (tests/megatron/slime_tasks.py)."""

import json
import math
import shlex

import pytest

from tests.distributed.pool import free_port
from tests.megatron.test_integrations import PAGE

OPTIONS = {"attention_variant": "sink", "head_balance_coeff": 1e3}
TASK = "tests.megatron.slime_tasks:loop"


def loop(pool, **more):
    (line,) = (
        line for line in PAGE.splitlines() if line.startswith("    python3 train.py $FLAGS ")
    )
    more |= {"flags": shlex.split(line.partition("$FLAGS")[2]), "options": json.dumps(OPTIONS)}
    found = pool.run(TASK, ranks=1, port=free_port(), **more)
    return found[0]


def test_its_steps_have_the_numbers_of_the_bare_loop(pool):
    """Though its batches are rows of documents in thd, and its model returns logits."""
    found = loop(pool)
    one, where = {"tp": 1, "pp": 1, "cp": 1}, {"ranks": 1, "port": free_port()}
    wanted = pool.run("tests.megatron.tasks:bare_loop", layout_=one, **where, **OPTIONS)[0]
    for step, (mine, line) in enumerate(zip(found, wanted, strict=True)):
        assert mine["committed"] == step
        for name in ("lm_loss", "grad_norm", "balance_loss"):
            assert mine[name] == pytest.approx(line[name], rel=2e-5, abs=1e-7), name
        for row, given in zip(mine["importance"], line["importance"], strict=True):
            assert row == pytest.approx(given, rel=1e-6)


def test_a_step_that_it_drops_is_committed(pool):
    found = loop(pool, bad=1)
    assert [line["moved"] for line in found] == [True, False, True, True]
    assert [line["committed"] for line in found] == [0, 1, 2, 3]
    assert [math.isfinite(line["grad_norm"]) for line in found] == [True, False, True, True]
    assert all(math.isfinite(line["balance_loss"]) for line in found if "balance_loss" in line)
