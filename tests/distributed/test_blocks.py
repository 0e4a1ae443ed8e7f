"""The options of the block do not depend on the layout: as test_layouts.py, and checkpoints.

A single process is compared with the definition in tests/layers/test_block.py.
"""

import numpy as np
import pytest

from tests.distributed import merging
from tests.distributed.layout import SINGLE, Layout
from tests.distributed.test_layouts import FULL, SP, compare, name_of

TRAIN = "tests.distributed.tiny_gpt:train"
CHECKPOINT = "tests.distributed.checkpoint_tasks"
TP, TP_SP, PP = Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2)
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
MODELS = {
    "sandwich": {"sandwich_norm": True},
    "sandwich-biases": {"sandwich_norm": True, "add_bias_linear": True},
    "post-norm-clip": {"post_norm": True, "residual_clip": 1.0, "normalization": "LayerNorm"},
    "clip": {"residual_clip": 1.0},
    "addition": {"multi_head_addition": True, "add_bias_linear": True},
    # One step: where its input is near 0, rounding decides whether relu has a gradient.
    "relu": {"ffn_activation": "relu", "steps": 1},
    "geglu": {"ffn_activation": "geglu"},
}
CASES = [
    ("sandwich", TP, {}),
    ("sandwich", TP_SP, SP | SELECTIVE),
    ("sandwich", PP, FULL),
    ("sandwich-biases", TP_SP, SP),
    ("post-norm-clip", TP, {}),
    ("post-norm-clip", TP_SP, SP | FULL),
    ("post-norm-clip", PP, {}),
    ("clip", TP_SP, SP),
    ("addition", TP, {}),
    ("addition", TP_SP, SP | FULL),
    ("addition", PP, {}),
    ("relu", TP, {}),
    ("geglu", TP_SP, SP),
]


@pytest.fixture(scope="module")
def single(pool):
    """The report of one process for a model."""
    return lambda model: pool.once(TRAIN, SINGLE, **MODELS[model])


@pytest.mark.parametrize(("model", "layout", "options"), CASES, ids=name_of)
def test_layout_changes_nothing(pool, single, model, layout, options):
    compare(pool.run(TRAIN, layout, **MODELS[model], **options), single(model))


@pytest.mark.parametrize("name", ["sandwich", "addition"])
def test_a_checkpoint_loads_under_another_layout(pool, tmp_path, name):
    options = {"distributed_optimizer": True, **MODELS[name]}
    folder = str(tmp_path)
    before = pool.run(f"{CHECKPOINT}:save_and_go_on", TP, folder=folder, **options)
    after = pool.run(f"{CHECKPOINT}:load_and_go_on", PP, folder=folder, **options)
    for kind in ("weights", "exp_avg_sq"):
        found, wanted = (merging.whole([r["saved"][kind] for r in rs]) for rs in (after, before))
        assert found.keys() == wanted.keys()
        for parameter in wanted:
            np.testing.assert_array_equal(found[parameter], wanted[parameter], err_msg=parameter)
    np.testing.assert_allclose(merging.loss(after), merging.loss(before), rtol=1e-5)


def test_names_in_a_checkpoint(pool):
    """They do not tell how the options are implemented."""
    (keys,) = pool.run(
        "tests.layers.tasks:checkpoint_keys", SINGLE, sandwich_norm=True, multi_head_addition=True
    )
    new = {k: v for k, v in keys.items() if "post_" in k or "linear_proj" in k}
    assert new == {
        "decoder.layers.post_self_attn_layernorm.weight": (2, 64),
        "decoder.layers.post_mlp_layernorm.weight": (2, 64),
        "decoder.layers.self_attention.linear_proj.weight": (2, 64, 16),
    }
    assert not [k for k in keys if "bda" in k]
