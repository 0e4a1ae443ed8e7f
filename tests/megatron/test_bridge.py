"""Megatron-Bridge: its provider and training step, with our spec and loss (bridge_tasks.py)."""

import pytest

from tests.distributed.pool import Pool, free_port
from tests.megatron.test_integrations import blocks


def test_its_steps_have_the_numbers_of_the_bare_loop(pool):
    (block,) = blocks("Megatron-Bridge")
    assert sum("# (" in line for line in block.splitlines()) == 3
    block = block.replace("1e-4", "1e3")
    with Pool(1) as alone:  # Bridge's modules and those that stand in are of that process
        where = {"ranks": 1, "port": free_port()}
        (found,) = alone.run("tests.megatron.bridge_tasks:loop", block=block, **where)
    one, where = {"tp": 1, "pp": 1, "cp": 1}, {"ranks": 1, "port": free_port()}
    options = {"attention_variant": "sink", "head_balance_coeff": 1e3}
    wanted = pool.run("tests.megatron.tasks:bare_loop", layout_=one, **where, **options)[0]
    for step, (mine, line) in enumerate(zip(found, wanted, strict=True)):
        assert (mine["committed"], mine["skipped"]) == (step, 0)
        assert mine["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-6)
        for name in ("lm_loss", "importance", "balance_loss"):
            assert mine[name] == line[name], name
