"""MLP activations and normed states: those of the whole sequence, by their definitions.

Shapes: N rows, T tokens, E hidden size.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from megasink.analysis.capture.first_block_tensors import fused_norm
from megasink.analysis.capture.first_token_geometry import (
    POSITIONS,
    SAMPLES,
    Rows,
    project,
    read_rows,
)
from megasink.analysis.capture.input_samples import Sample
from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.analysis.metrics import STATISTICS
from megasink.analysis.metrics.pca_tsne import neighbor_embedding
from tests.analysis.capture.kept import Kept
from tests.analysis.capture.tiny_models import tiny_model
from tests.distributed.layout import SINGLE

TOKENS = 13


def samples(count=3, length=TOKENS):
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(3, 64, (count, length), generator=generator).tolist()
    return [Sample(tuple(row), "d", "s") for row in ids]


def rows_of(model, of):
    return read_rows(partial(TransformersProbe, model), of)


def states_of(model, sample):
    """half -> float64 [T, E] of the whole sequence."""
    kept = Kept(STATISTICS)
    with TransformersProbe(model, kept) as probe:
        probe.forward(torch.tensor([sample.tokens]))
    return {half: state.double() for (_, half), state in kept.states.items()}


def rms(state_TE, norm):
    size = (state_TE.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    return state_TE / size * norm.weight.double()


def layer_norm(state_TE, norm):
    centred = state_TE - state_TE.mean(-1, keepdim=True)
    size = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return centred / size * norm.weight.double() + norm.bias.double()


def close(rows, expected):
    np.testing.assert_allclose(rows, expected.detach().numpy(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["llama", "phi-3"])
def test_a_gated_mlp(name):
    if name == "phi-3":  # up and gate in one projection
        config = transformers.Phi3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        model = transformers.Phi3ForCausalLM._from_config(config).eval()
    else:
        model = tiny_model(name)
    given = samples()
    rows = rows_of(model, given)
    assert rows.missing == {}
    assert rows.position_N.tolist() == [*range(POSITIONS)] * 3
    assert rows.sample_N.tolist() == [0] * POSITIONS + [1] * POSITIONS + [2] * POSITIONS
    layers = model.model.layers
    mlp = layers[0].mlp
    first = [torch.stack([s[0] for s in states_of(model, x).values()]) for x in given]
    close(rows.first_state_SE, torch.stack(first).mean(0))
    for index, sample in enumerate(given):
        states, mine = states_of(model, sample), rows.sample_N == index
        norms = [n for x in layers for n in (x.input_layernorm, x.post_attention_layernorm)]
        for half, norm in enumerate(norms):
            close(rows.by_site[str(half)][mine], rms(states[half], norm)[:POSITIONS])
        normed = rms(states[1], norms[1])
        weight = (
            mlp.gate_up_proj.weight.double().chunk(2)
            if name == "phi-3"
            else (mlp.gate_proj.weight.double(), mlp.up_proj.weight.double())
        )
        gate, up = (normed @ w.T for w in weight)
        close(rows.by_site["mlp0_up"][mine], up[:POSITIONS])
        close(rows.by_site["mlp0"][mine], (gate * torch.sigmoid(gate) * up)[:POSITIONS])


def test_an_mlp_without_a_gate_and_a_layer_norm():
    model, (sample,) = tiny_model("gpt-2"), samples(1)
    rows, states = rows_of(model, [sample]), states_of(model, sample)
    block = model.transformer.h[0]
    normed = layer_norm(states[1], block.ln_2)
    up = normed @ block.mlp.c_fc.weight.double() + block.mlp.c_fc.bias.double()
    close(rows.by_site["0"], layer_norm(states[0], block.ln_1)[:POSITIONS])
    close(rows.by_site["mlp0_up"], up[:POSITIONS])
    close(rows.by_site["mlp0"], torch.nn.functional.gelu(up, approximate="tanh")[:POSITIONS])


@pytest.mark.parametrize(
    ("name", "found", "missing"),
    [
        ("gpt-neox", {"mlp0", "mlp0_up", "0", "2"}, {}),  # the MLP reads the block's input
        ("olmo-2", {"mlp0", "mlp0_up"}, {"normed state 0.5": "block 0 has no norm before"}),
        ("qwen3-moe", {"0", "1", "2", "3"}, {"mlp0": "experts have no common activation"}),
        ("gpt-oss", {"0", "1", "2", "3"}, {"mlp0_up": "experts have no common activation"}),
        ("gemma-3", {"mlp0", "mlp0_up", "0", "1", "2", "3"}, {}),
        ("qwen3.5", {"mlp0", "mlp0_up", "0", "1", "2", "3"}, {}),
        ("lfm3", {"mlp0", "mlp0_up", "0", "1", "2", "3"}, {}),
    ],
)
def test_what_other_models_have(name, found, missing):
    rows = rows_of(tiny_model(name), samples(1))
    assert set(rows.by_site) == found
    for key, reason in missing.items():
        assert reason in rows.missing[key]
    _, told = project(rows, seed=0)
    for key, reason in missing.items():
        assert reason in told["missing"][key]


def test_what_is_kept_is_bounded():
    model = tiny_model("llama")
    rows = rows_of(model, [*samples(70), *samples(1, length=3)])
    assert len(rows.position_N) == SAMPLES * POSITIONS
    assert rows.sample_N[0] == 0
    assert 60 < rows.sample_N[-1] < 70  # spread over all; the one of 3 tokens is too short
    assert rows.by_site["mlp0"].shape == (SAMPLES * POSITIONS, 48)
    short = rows_of(model, samples(4, length=3))
    assert len(short.position_N) == 12


def test_points_and_numbers():
    rng = np.random.default_rng(0)
    position = np.tile(np.arange(8), 6)
    far = np.zeros((48, 16), dtype=np.float32)
    far[position == 0] = 40.0  # position 0 is a cluster of its own
    far += rng.normal(size=far.shape)
    by_site = {"mlp0": far, "1": far, "3": np.ones((48, 4), dtype=np.float32)}
    sample, missing = np.repeat(np.arange(6), 8), {"mlp0_up": "no reason"}
    rows = Rows(by_site, position, sample, missing, np.ones((1, 16)), np.zeros(1))
    arrays, told = project(rows, seed=5)
    assert told["missing"]["mlp0_up"] == "no reason"
    assert "are equal" in told["missing"]["normed state 1.5"]
    assert told["mlp0"]["perplexity"] == pytest.approx(47 / 3)
    assert told["mlp0"]["seed"] == 5
    assert 0 < told["mlp0"]["kl_divergence"] < 1
    assert told["normed"]["states"] == [0.5]
    values = np.linalg.eigvalsh(np.cov(far.T.astype(np.float64)))[::-1]
    np.testing.assert_allclose(told["normed"]["explained"][0], values[:2] / values.sum())
    assert (arrays["normed_pca_N2"] == arrays["normed_pca_SN2"][-1]).all()
    for points in (arrays["mlp0_tsne_N2"], arrays["normed_pca_N2"]):
        first, others = points[position == 0], points[position > 0]
        between = np.linalg.norm(first[:, None] - others, axis=-1).min(1)
        within = np.linalg.norm(first[:, None] - first, axis=-1).max(1)
        assert (between > within).all()
    assert np.array_equal(
        neighbor_embedding(far.astype(np.float64), 5).points, arrays["mlp0_tsne_N2"]
    )
    equal = np.repeat(far[:8].astype(np.float64), 4, axis=0)  # as first tokens of texts may be
    assert neighbor_embedding(equal, 5).divergence > 0
    with pytest.raises(ValueError, match="t-SNE of 7 rows: 8 or more"):
        neighbor_embedding(far[:7], 0)
    with pytest.raises(ValueError, match="are equal"):
        neighbor_embedding(np.ones((9, 2)), 0)


@pytest.mark.parametrize("centred", [False, True])
def test_a_fused_norm_is_computed_again(centred):
    """The norm inside TransformerEngine's LayerNormLinear, which hides what it returns."""
    state, weight, bias = 9.0 * torch.randn(5, 1, 24), torch.randn(24), torch.randn(24)
    linear = SimpleNamespace(
        layer_norm_weight=weight - 1 if centred else weight,
        layer_norm_bias=None,
        eps=1e-5,
        normalization="RMSNorm",
        zero_centered_gamma=centred,
    )
    norm = SimpleNamespace(weight=weight, bias=bias, variance_epsilon=1e-5, eps=1e-5)
    close(fused_norm(linear, state), rms(state.double(), norm))
    linear.normalization, linear.layer_norm_bias = "LayerNorm", bias
    close(fused_norm(linear, state), layer_norm(state.double(), norm))


@pytest.mark.parametrize("kind", ["sink", "post-norm", "prefix", "experts"])
def test_rows_of_a_megatron_model(pool, kind):
    options = {
        "post-norm": {"post_norm": True},
        "prefix": {"prefix_lm_tokens": 10, "attention_variant": "vanilla"},
        "experts": {"num_moe_experts": 4, "moe_router_topk": 2},
    }.get(kind, {})
    (report,) = pool.run("tests.analysis.capture.megatron_tasks:rows", SINGLE, **options)
    rows, states = report["rows"], report["states"]
    if kind == "experts":
        assert "experts" in report["missing"]["mlp0"]
    else:
        assert report["missing"].keys() == (
            {f"normed state {s}" for s in ("0", "0.5", "1", "1.5")}
            if kind == "post-norm"
            else set()
        )
        close(rows["mlp0"], torch.from_numpy(report["product"]))
        close(rows["mlp0_up"], torch.from_numpy(report["up"]))
    if kind != "post-norm":
        for half in range(4):
            norm = SimpleNamespace(
                weight=torch.from_numpy(report["weights"][half]), variance_epsilon=report["eps"]
            )
            expected = rms(torch.from_numpy(states[half]).double(), norm)
            close(rows[str(half)], expected[:POSITIONS])
