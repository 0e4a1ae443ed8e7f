"""Every registered metric against its S x S float64 definition.

Shapes: H query heads, G key/value groups, T tokens, D head dim, E hidden size.
"""

import re
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
import torch

from megasink.analysis.capture.attention_statistics import AttentionCall, attention_statistics
from megasink.analysis.capture.measurements import AnalysisValues
from megasink.analysis.capture.segments import Segment
from megasink.analysis.metrics import attention_weights, metric, metrics, registry
from megasink.analysis.metrics.attention_weights import SIMILARITIES, proxy_statistics
from megasink.analysis.metrics.registry import ATTENTION as ATTENTION_STATISTICS
from tests.analysis.metrics import definitions

HEADS, GROUPS, TOKENS, DIM, HIDDEN = 6, 2, 37, 8, 24
KINDS = (
    "vanilla",
    "window",
    "sink",
    "sink-window",
    "bias",
    "softcap",
    "prefix",
    "headwise",
    "elementwise",
    *SIMILARITIES,
    "sigmoid-window",
    "identity-window",
)


def case(kind: str, dtype: torch.dtype = torch.float32) -> tuple[AttentionCall, definitions.Layer]:
    """Large scores, sinks of +-5 and skewed gates: zeros would hide mistakes."""
    torch.manual_seed(KINDS.index(kind))
    query = (3.0 * torch.randn(HEADS, TOKENS, DIM)).to(dtype)
    key = torch.randn(GROUPS, TOKENS, DIM)
    key[:, 0] *= 3.0  # a sink on the first token
    key, value = key.to(dtype), torch.randn(GROUPS, TOKENS, DIM).to(dtype)
    weight = torch.randn(HEADS, DIM, HIDDEN).to(dtype)
    options: dict[str, Any] = {"scale": 0.5}
    gate, sink, bias = None, None, None
    if "window" in kind:
        options["window"] = 7
    if "sink" in kind:
        sink = torch.linspace(-5, 5, HEADS)
    if kind == "bias":
        bias = torch.linspace(-2.0, 0.5, HEADS)[:, None] * torch.arange(TOKENS)
    if kind == "softcap":
        options["softcap"] = 4.0
    if kind == "prefix":
        options["prefix"] = 5
    if kind.endswith("wise"):
        width = 1 if kind == "headwise" else DIM
        gate = torch.sigmoid(4.0 * torch.randn(HEADS, TOKENS, width) - 2.0).to(dtype)
    similarity = kind.removesuffix("-window")
    if similarity in SIMILARITIES:
        options["similarity"] = similarity
        if similarity == "mlp":  # of which some rows are dead
            options["mlp"] = tuple(torch.randn(2, DIM, DIM) - 0.3)
        layer = definitions.similarity_layer_of(query, key, value, weight, **options)
    else:
        layer = definitions.layer_of(
            query, key, value, weight, **options, sink_H=sink, bias_HT=bias, gate_HTX=gate
        )
    call = AttentionCall(
        query[None],
        key[None],
        value[None],
        layer.out_HTD[None].to(dtype),
        **options,
        slot_logit_BHT=None if sink is None else sink[None, :, None],
        distance_bias_HT=bias,
        gated_out_BHTD=None if gate is None else layer.gated_HTD[None].to(dtype),
        explicit_gate_BHTX=None if gate is None else gate[None],
        output_weight_HDE=weight,
    )
    return call, layer


def statistics_of(
    call: AttentionCall, needs: Set[str] = ATTENTION_STATISTICS.keys()
) -> dict[str, torch.Tensor]:
    (found,) = attention_statistics(call, [Segment(0, 0, TOKENS)], needs)
    return found


def test_every_metric_has_a_definition():
    of_statistics = set(definitions.ATTENTION) | set(definitions.STATE)
    of_outputs = {n for n, m in metrics().items() if not m.is_derived and not m.takes_backward}
    assert of_outputs == of_statistics  # slopes of the loss: capture/test_transformers.py
    assert {n for n, m in metrics().items() if m.is_derived} == set(definitions.DERIVED)
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    for entry in metrics().values():
        assert entry.definition.endswith("."), entry.name
        row = rf"\| `{entry.name}` \|.*\| {entry.axis} \| {re.escape(entry.source)} \|"
        assert re.search(row, page), entry


@pytest.mark.parametrize(
    "tile", [attention_weights.SIZE, 500]
)  # one tile, and one of four rows each
@pytest.mark.parametrize("kind", KINDS)
def test_metrics_of_attention(kind, tile, monkeypatch):
    monkeypatch.setattr(attention_weights, "SIZE", tile)
    call, layer = case(kind)
    found = statistics_of(call)
    alone = statistics_of(call, {"first_weight_HT"})  # by a way of its own
    torch.testing.assert_close(alone, {n: found[n] for n in alone}, atol=0.0, rtol=1e-5)
    tested = 0
    for name, definition in definitions.ATTENTION.items():
        entry = metrics()[name]
        if not set(entry.needs) <= set(found):
            assert "explicit_gate_HTX" in entry.needs
            assert layer.gate_HTX is None
            continue
        actual = entry.compute(**{need: found[need] for need in entry.needs})
        # Entropies within 1e-4 nats, see docs/instruments.md; the rest relatively.
        exact = {"atol": 1e-4, "rtol": 0} if name == "aeqd" else {"atol": 1e-7, "rtol": 1e-5}
        if name.startswith("sparsity"):  # float32 outputs may round across the limit
            exact = {"atol": 1.5 / (HEADS * TOKENS * DIM), "rtol": 0}
        torch.testing.assert_close(
            actual.double(), definition(layer).double(), **exact, equal_nan=True, msg=name
        )
        tested += 1
    assert tested >= 23


def test_shares_below_two_limits():
    """Most values lie around the limits, none so near one that rounding moves it across."""
    size = torch.logspace(-5, 0, 1001, dtype=torch.float64) * 1.0003
    out = (size * torch.tensor([1.0, -1.0]).repeat(501)[:1001]).view(1, 1001, 1)
    for suffix, limit in (("", 1e-2), ("_1e-3", 1e-3)):
        for name, factor in (("before_gate", 1.0), ("after_gate", 1.0), ("of_mean_gate", 0.25)):
            entry = metrics()[f"sparsity_{name}{suffix}"]
            gate = torch.tensor([0.2, 0.3]).view(1, 2, 1)
            given = dict.fromkeys(("out_HTD", "gated_out_HTD"), out.float())
            given["explicit_gate_HTX"] = gate
            found = entry.compute(**{need: given[need] for need in entry.needs})
            expected = float((size * factor < limit).double().mean())
            assert 0.1 < expected < 0.9
            assert float(found) == pytest.approx(expected, rel=1e-6), entry.name


def test_a_row_of_zeros_attends_to_nothing():
    query = torch.tensor([1.0, 0.0, 2.0]).view(1, 1, 3, 1)
    key = torch.tensor([-3.0, 1.0, 1.0]).view(1, 1, 3, 1)
    found = proxy_statistics(query, key, similarity="identity", scale=1.0)
    torch.testing.assert_close(found.first_weight_BHT, torch.tensor([[[1.0, 0.0, 0.6]]]))
    assert found.gate_BHT[0, 0, 1] == 1.0
    assert found.gate_BHT[0, 0, 0] == pytest.approx(1e-8 / 3, rel=1e-5)  # not 1 - 0.99999999
    assert found.entropy_BHT[0, 0, 1] == found.square_BHT[0, 0, 1] == 0.0
    with pytest.raises(ValueError, match="unknown similarity 'cosine': choose sigmoid, elu-plus"):
        proxy_statistics(query, key, similarity="cosine", scale=1.0)


@pytest.mark.parametrize("kind", ["vanilla", "sink-window"])
def test_metrics_of_bf16_models(kind):
    """The inputs are rounded, the statistics are not: float32 sums of what bf16 holds."""
    call, layer = case(kind, torch.bfloat16)
    found = statistics_of(call)
    for name in ("awft", "importance", "ftvvn", "avvn", "alpha", "square_sum", "key_norm"):
        entry = metrics()[name]
        actual = entry.compute(**{need: found[need] for need in entry.needs})
        expected = definitions.ATTENTION[name](layer)
        torch.testing.assert_close(actual.double(), expected, atol=1e-7, rtol=1e-5, msg=name)


@pytest.mark.parametrize("name", definitions.STATE)
def test_metrics_of_states(name):
    torch.manual_seed(1)
    rows = torch.randn(9, HIDDEN)
    rows[0, 3] = -400.0
    entry = metrics()[name]
    actual = entry.compute(**dict.fromkeys(entry.needs, rows))
    expected = definitions.STATE[name](rows.double())
    torch.testing.assert_close(actual.double(), expected.double(), atol=0, rtol=1e-5)


def test_a_gate_that_is_almost_shut_keeps_its_digits():
    query = torch.full((1, 1, 4, 1), 10.0)
    key = torch.tensor([4.0, 0.0, 0.0, 0.0]).view(1, 1, 4, 1)
    call = AttentionCall(query, key, key, key, scale=1.0)
    (found,) = attention_statistics(call, [Segment(0, 0, 4)], {"gate_HT", "first_weight_HT"})
    assert found["gate_HT"][0, 0] == 0.0
    torch.testing.assert_close(found["gate_HT"][0, 1:], torch.tensor([1.0, 2.0, 3.0]) * 4.2484e-18)
    assert (found["first_weight_HT"] == 1.0).all()


@pytest.mark.parametrize("kind", range(4))
def test_metrics_that_are_made_of_others(kind):
    """Over values that are drawn; the alphas of each kind make another stage of the circuit."""
    generator = torch.Generator().manual_seed(kind)
    samples, layers, heads, keys = 5, 4, 3, 4
    shape = {"head": (layers, heads), "head column": (layers, heads, keys), "layer": (layers,)}
    shape |= {"state": (2 * layers + 1,)}
    values = {
        entry.name: torch.rand(samples, *shape[entry.axis], generator=generator).double()
        for entry in metrics().values()
        if not entry.is_derived and entry.axis in shape
    }
    values["alpha"] *= torch.tensor([[0.1] * 4, [0.9, 0.2, 0.2, 0.2], [0.9] * 4, [0.2, 1, 0, 0]])[
        kind
    ]
    values["massive_ratio"] *= 30.0
    facts = {
        name: torch.randint(5, 50, (samples,), generator=generator).double()
        for name in ("tokens_N", "nats_N", "targets_N", "bytes_N", "nats_of_bytes_N")
    }
    cosine_SP = torch.rand(2 * layers + 1, 6, generator=generator).double()
    found = AnalysisValues(values, {**facts, "cosine_SP": cosine_SP, "seed": 7})
    given = {name.removesuffix("_N"): fact for name, fact in facts.items()}
    given |= {**values, "cosine": cosine_SP, "seed": torch.tensor(7)}
    for name, definition in definitions.DERIVED.items():
        expected = definition(given).double()
        if expected.isnan().all():
            assert name not in found.overall
            continue
        torch.testing.assert_close(found.overall[name].double(), expected, msg=name)


def test_what_was_not_measured_leaves_its_metrics_out():
    values = {"awft": torch.rand(2, 1, 3).double(), "gate_min": torch.full((2, 1), torch.nan)}
    found = AnalysisValues(values, {"tokens_N": torch.tensor([3.0, 4.0])})
    assert set(found.overall) == {
        *("awft", "awft_ln", "first_token_attention", "heads_over_drain_threshold"),
    }


@pytest.fixture
def unregistered(monkeypatch):
    """What a test registers is forgotten."""
    metrics()
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def _new(gate_HT):
    """A definition."""
    return gate_HT


def _gini(importance_LH, importance_NH):
    """A definition."""


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (_new, {"axis": "diagonal"}, "axis 'diagonal'"),
        (_new, {"axis": "model"}, "axis 'model', which only derived metrics can have"),
        (_new, {"name": "awft"}, "'awft' is registered twice, first in .*head_scores"),
        (_new, {"source": ""}, "has no source"),
        (_new, {"shown": ("table", "wall")}, "has shown 'wall': choose table, curve"),
        (_new, {"axis": "layer", "shown": ("heatmap",)}, "heatmap, which needs axis 'head'"),
        (lambda gate_HT: gate_HT, {}, "has no docstring"),
        (lambda colour: colour, {}, "needs colour, which is neither a statistic"),
        (lambda gate_HT, state_TE: gate_HT, {}, "not available together"),
        (_gini, {}, "needs importance_NH: write importance_LH or importance_NLH"),
        (_gini, {"shown": ("wasserstein",)}, "no values by sample: set over_samples"),
    ],
)
def test_registering_is_refused(function, arguments, message):
    options = {"name": "new", "source": "a test", "unit": "1", "axis": "head"} | arguments
    with pytest.raises(ValueError, match=message):
        metric(**options)(function)
    assert "new" not in metrics()


def test_an_unknown_metric_is_named():
    with pytest.raises(ValueError, match="unknown metric colour"):
        metrics(["colour"])
