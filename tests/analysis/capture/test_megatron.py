"""Capture from a GPT of Megatron: nothing changes, and what is read obeys the definitions."""

import numpy as np
import pytest
import torch

from megasink.analysis.metrics import metrics
from tests.analysis.metrics import definitions
from tests.distributed.layout import SINGLE, Layout

TASKS = "tests.analysis.capture.megatron_tasks"
GATED = {"attention_variant": "gated"}
KINDS = {
    "vanilla": {"attention_variant": "vanilla"},
    "sink-window": {"window_size": (3, 0), "window_attn_skip_freq": [0, 1]},
    "off-by-one": {"attention_variant": "off-by-one"},
    "headwise": GATED,
    "elementwise": GATED | {"gate_granularity": "elementwise"},
    "headwise-one-layer": GATED | {"attention_variant_layers": [0, 1]},
    "sink-one-layer": {"attention_variant_layers": [0, 1]},
    "k-bias": {"attention_variant": "k-bias"},
    "kv-bias": {"attention_variant": "kv-bias"},
    "alibi": {"position_embedding_type": "none", "attention_bias_type": "alibi"},
    "multi-head-addition": {"multi_head_addition": True},
    "switch": {"switch_heads": "key-value", "switch_experts": 3, "switch_top_k": 2},
    "post-norm": {"post_norm": True},
    "bf16": {"bf16": True},
} | {
    name: {
        "attention_variant": "vanilla",
        "head_balance_coeff": 0.0,
        "attention_similarity": name,
        "attention_normalization": normalization,
    }
    for name, normalization in (
        ("sigmoid", "none"),
        ("elu-plus-one", "none"),
        ("elu-kernel", "row-sum"),
        ("identity", "row-sum"),
        ("mlp", "row-sum"),
    )
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_gpt_does_is_what_is_read(pool, kind):
    (report,) = pool.run(f"{TASKS}:probed", SINGLE, **KINDS[kind])
    assert report["equal"]
    report = _tensors(report)
    assert sorted({half for _, half in report["states"]}) == [0, 1, 2, 3, 4]
    exact = {"atol": 2e-5, "rtol": 2e-5} if kind != "bf16" else {"atol": 2e-2, "rtol": 2e-2}
    for sample in range(2):
        found = report["layers"][sample, 1]
        layer = _by_definition(kind, found, report)
        torch.testing.assert_close(
            found["map_HTS"].double(), layer.weights_HTS, atol=1e-5, rtol=1e-5
        )
        out = layer.out_HTD
        if report["value_bias"] is not None:
            out = out + layer.slot_HT[..., None] * report["value_bias"].double()[:, None]
        torch.testing.assert_close(found["out_HTD"].double(), out, **exact)
        for name, definition in definitions.ATTENTION.items():
            entry = metrics()[name]
            if name.startswith(("sparsity", "abs_mean", "ahon", "lthon", "circuit", "output")):
                continue  # of the output, compared above
            if set(entry.needs) <= set(found):
                actual = entry.compute(**{need: found[need] for need in entry.needs})
                torch.testing.assert_close(
                    actual.double(),
                    definition(layer).double(),
                    atol=1e-4,
                    rtol=1e-4,
                    equal_nan=True,
                    msg=name,
                )
        gate = found.get("explicit_gate_HTX", torch.ones(()))
        torch.testing.assert_close(found["gated_out_HTD"], found["out_HTD"] * gate, **exact)
        written = (found["gated_out_HTD"][..., None, :] @ found["output_weight_HDE"][:, None]).sum(
            0
        )
        torch.testing.assert_close(found["attention_branch_TE"], written[:, 0], **exact)
        before, middle, after = (report["states"][sample, half] for half in (2, 3, 4))
        residuals = [before, middle]
        if kind == "post-norm":  # the states are those before the norm of the sum
            norms = zip(residuals, report["post_norms"], strict=True)
            residuals = [torch.nn.functional.rms_norm(x, w.shape, w, 1e-5) for x, w in norms]
        torch.testing.assert_close(residuals[0] + found["attention_branch_TE"], middle, **exact)
        torch.testing.assert_close(residuals[1] + found["mlp_branch_TE"], after, **exact)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bf16"])
def test_the_gradient_of_a_mask_is_the_slope_of_the_loss(pool, kind):
    ((found, slope),) = pool.run(f"{TASKS}:gradients", SINGLE, step=3e-3, **KINDS[kind])
    assert np.abs(found - slope).max() < 1e-2 * np.abs(slope).max()


def _by_definition(kind, found, report):
    inputs = [found[n] for n in ("query_HTD", "key_GTD", "value_GTD", "output_weight_HDE")]
    query = inputs[0]
    scale, sink = query.shape[-1] ** -0.5, report["sink"]
    if "attention_similarity" in KINDS[kind]:
        return definitions.similarity_layer_of(
            *inputs,
            similarity=kind,
            normalization=KINDS[kind]["attention_normalization"],
            scale=scale,
            mlp=report["mlp"],
        )
    if kind == "off-by-one":
        sink = torch.zeros(4)
    return definitions.layer_of(
        *inputs,
        scale=scale,
        window=4 if kind == "sink-window" else None,
        sink_H=sink if report["key_bias"] is None else _slot_of(query, report, scale),
        bias_HT=report["bias"],
        gate_HTX=found.get("explicit_gate_HTX"),
    )


def _tensors(value):
    """Workers answer in numpy."""
    if isinstance(value, dict):
        return {key: _tensors(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_tensors(entry) for entry in value]
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _slot_of(query_HTD, report, scale):
    """The slot's logits [H, T] of a key bias."""
    return scale * (query_HTD.double() * report["key_bias"].double()[:, None]).sum(-1)


def test_models_that_cannot_be_read_are_refused(pool):
    (problems,) = pool.run(f"{TASKS}:refused", SINGLE, training=True)
    assert problems == ["the model is in training mode: call model.eval()"]
    for problems in pool.run(f"{TASKS}:refused", Layout(tp=2)):
        assert problems == ["the model is sharded by TP 2: load it whole in one process"]
