"""The norms that stand in for Megatron's fallback. Under TP+SP: tests/distributed."""

from tests.distributed.layout import SINGLE


def test_norms(pool):
    (found,) = pool.run("tests.megatron.layer_tasks:norm_facts", SINGLE)
    assert found["RMSNorm"] == found["LayerNorm"] == (True, 1e-3, False)
    assert found["RMSNorm sequence parallel"] == [True]
    assert found["LayerNorm sequence parallel"] == [True, True]
    assert "--apply-layernorm-1p" in found["zero-centred"]
    assert "'BatchNorm'" in found["other"]
