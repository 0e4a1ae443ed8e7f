"""What an analysis found, as one dictionary: the content of results.json.

Shapes: N samples, L layers, H heads, K key positions, P token positions.
"""

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import megasink
from megasink.diagnostics import metrics
from megasink.diagnostics.circuit import circuit_stage, prominent_layer, sink_centre
from megasink.diagnostics.head_scores import derived_scores
from megasink.diagnostics.importance import head_importance, layer_imbalance, pooled_gate
from megasink.diagnostics.sinks import (
    EPSILON,
    first_token_attention,
    layer_sink_rate,
    sink_rate,
)
from megasink.diagnostics.states import mean_max_activation
from megasink.diagnostics.thresholds import (
    SHARES,
    agreement,
    inactive,
    share_by_layer,
    threshold,
)
from megasink.diagnostics.tokens import repeat_rate
from megasink.probe.inputs import Sample
from megasink.probe.parts import Captured

FORMAT = 2
"""Raised when a key of results.json changes its meaning."""

EPSILONS = (0.2, 0.3, 0.4, 0.5)
DRAIN = 0.75
"""The tau of P0's Eq. 9."""
AGREEMENT_SHARE, LAYER_SHARE = 0.1, 0.15
NGRAMS = (2, 3, 4)
SYNTHETIC = ("random", "repeated")
SCORES = ("awft", "aeqd", "ftvvn", "avvn", "lthon", "ahon", "circuit_ahon")

Floats = NDArray[np.float64]


def all_scores(captured: Captured, seed: int) -> dict[str, Floats]:
    """P3's scores [N, L, H]: the six, the circuit-based one, their (LN) forms, (HN) and random."""
    own = {name: captured.of(name) for name in SCORES if name in captured.values}
    return {name: t.numpy() for name, t in {**own, **derived_scores(own, seed)}.items()}


def summarise(
    captured: Captured,
    *,
    model: dict[str, Any],
    run: dict[str, Any],
    inputs: Sequence[Sample] = (),
    geometry: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The dictionary of results.json (docs/instruments.md describes every key).

    Args:
        captured: with every metric.
        model: what was analyzed: "name", "kind", "dtype" and so on.
        run: how: "seed", "data_sha256" and so on.
        inputs: the samples, for what is counted of their tokens.
        geometry: of `megasink.probe.geometry.project`.
    """
    datasets = list(dict.fromkeys(sample["dataset"] for sample in captured.samples))
    everything = np.ones(len(captured.samples), dtype=bool)
    found: dict[str, Any] = {
        "format": FORMAT,
        "megasink": megasink.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "model": {**model, "layers": len(captured.heads), "heads": captured.heads},
        "run": run,
        "samples": len(captured.samples),
        "tokens": sum(sample["tokens"] for sample in captured.samples),
        "non_finite": [asdict(entry) for entry in captured.non_finite],
        **_of_samples(captured, everything),
        "curves": _curves(captured),
        "circuit": circuit_of(captured),
        "inactive_heads": _inactive(captured, int(run["seed"])),
        "datasets": {},
        "geometry": geometry or {},
    }
    for name in datasets:
        mine = np.asarray([sample["dataset"] == name for sample in captured.samples])
        found["datasets"][name] = {
            "samples": int(mine.sum()),
            **_of_samples(captured, mine),
            "score_quantiles": _quantiles(captured, mine),
            "repeat_rate": _repeat_rates([s.tokens for s in inputs if s.dataset == name]),
        }
    found |= _average_perplexity(found["datasets"])
    if captured.gate_histogram_LB.any():
        found["gate_histogram"] = captured.gate_histogram_LB.tolist()
    cleaned: dict[str, Any] = clean(found)
    return cleaned


def _of_samples(captured: Captured, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """What is averaged over some of the samples."""

    def of(name: str) -> torch.Tensor:
        return captured.of(name)[torch.from_numpy(chosen)]

    samples = [s for s, is_chosen in zip(captured.samples, chosen, strict=True) if is_chosen]
    tokens_N = torch.tensor([sample["tokens"] for sample in samples])
    importance_LH = head_importance(of("importance"), tokens_N)
    imbalance_L = layer_imbalance(importance_LH)
    alpha_NLHK, awft_NLH = of("alpha"), of("awft")
    columns = range(alpha_NLHK.shape[-1])
    attention_L = first_token_attention(awft_NLH)
    found: dict[str, Any] = {
        "importance": importance_LH,
        "imbalance": imbalance_L.nanmean(),
        "imbalance_by_layer": imbalance_L,
        "first_token_attention": attention_L.nanmean(),
        "first_token_attention_by_layer": attention_L,
        "sink_rate": {
            f"{e:g}": [sink_rate(alpha_NLHK[..., k], e) for k in columns] for e in EPSILONS
        },
        "sink_rate_by_layer": layer_sink_rate(alpha_NLHK[..., 0], EPSILON),
        **_sinks_anywhere(of("sink_position"), of("sink_alpha")),
        "slot_attention_by_layer": of("slot_alpha").nanmean((0, 2)),
        "heads_over_drain_threshold": layer_sink_rate(awft_NLH, DRAIN).nanmean(),
        "mean_max_activation": mean_max_activation(of("state_abs_max")[:, 2::2]),
        "state_abs_max": of("state_abs_max").nanmean(0),
        "massive_ratio": of("massive_ratio").nanmean(0),
        "attention_abs_max": of("attention_abs_max").nanmean(0),
        "mlp_abs_max": of("mlp_abs_max").nanmean(0),
        "mean_score": {
            name: captured.of(name)[torch.from_numpy(chosen)].nanmean(0) for name in SCORES
        },
        **loss_of(samples),
    }
    if captured.gate_histogram_LB.any():
        names = [n for n, m in metrics().items() if m.axis == "layer" and "gate" in n]
        found["gate"] = {
            **{name: of(name).nanmean(0) for name in names},
            **pooled_gate(
                of("gate_score"), of("gate_std"), of("gate_min"), of("gate_max"), tokens_N
            )._asdict(),
        }
        found["mean_gate_score"] = found["gate"]["gate_score"].nanmean()
    return found


def _sinks_anywhere(position_NLH: torch.Tensor, alpha_NLH: torch.Tensor) -> dict[str, Any]:
    """How many heads sink on some token, and which token that is (P3.31)."""
    sinks_NLH = alpha_NLH > EPSILON
    positions, counts = np.unique(position_NLH[sinks_NLH].numpy(), return_counts=True)
    heads = int((~alpha_NLH.isnan()).sum())
    return {
        "sink_rate_anywhere": float(sinks_NLH.sum()) / heads if heads else math.nan,
        "sink_positions": {
            str(int(p)): int(c) / heads for p, c in zip(positions, counts, strict=True)
        },
    }


def loss_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over sums: nats per token, perplexity, bits per byte (P0.18)."""
    if not samples or "nats" not in samples[0]:
        return {}
    nats = sum(sample["nats"] for sample in samples) / sum(sample["targets"] for sample in samples)
    found = {"nats_per_token": nats, "perplexity": math.exp(nats)}
    size = sum(sample.get("bytes", 0) for sample in samples)
    if size:
        bits = sum(sample["nats_of_bytes"] for sample in samples) / math.log(2)
        found["bits_per_byte"] = bits / size
    return found


def _quantiles(captured: Captured, chosen: NDArray[np.bool_]) -> dict[str, Floats]:
    """The 101 percentiles of each score over the samples and heads of one dataset (P3.23)."""
    shares = np.linspace(0, 1, 101)
    return {name: np.nanquantile(captured.values[name][chosen], shares) for name in SCORES}


def _repeat_rates(documents: list[tuple[int, ...]]) -> dict[str, float]:
    """{n: share of n-grams of equal tokens} of the sequences that ran (P4.14)."""
    longest = max(map(len, documents), default=0)
    return {str(n): repeat_rate(documents, n) for n in NGRAMS if longest >= n}


def _average_perplexity(datasets: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Over the texts, each one counted once (P1.26): both readings of the paper's average."""
    nats = [
        found["nats_per_token"]
        for name, found in datasets.items()
        if name not in SYNTHETIC and "nats_per_token" in found
    ]
    if not nats:
        return {}
    return {
        "average_perplexity": sum(map(math.exp, nats)) / len(nats),
        "perplexity_of_average_nats": math.exp(sum(nats) / len(nats)),
    }


def _curves(captured: Captured) -> dict[str, Any]:
    """Means over samples by layer or state and token position."""
    curves: dict[str, Any] = {
        name: captured.of(name).nanmean(0)
        for name, entry in metrics().items()
        if entry.axis.endswith("position") and name in captured.values
    }
    curves["cosine_across_inputs"] = captured.cosine_SP
    return curves


def circuit_of(captured: Captured) -> dict[str, Any]:
    """Where the sink becomes prominent, where its centre is, and the stage (P4.15 to P4.24)."""
    ratio_L = captured.of("massive_ratio").nanmean(0)[2::2].numpy()
    attention_L = first_token_attention(captured.of("awft")).numpy()
    alpha_NLHK = captured.of("alpha")
    rate_K = np.asarray([float(sink_rate(alpha_NLHK[..., k])) for k in range(alpha_NLHK.shape[-1])])
    prominent = prominent_layer(ratio_L, attention_L)
    centre = sink_centre(alpha_NLHK.nanmean(0).numpy(), captured.cosine_SP)
    return {
        "prominent_after_block": prominent,
        "sink_centre_by_attention": centre.by_attention,
        "sink_centre_by_direction": centre.by_direction,
        "stage": circuit_stage(rate_K, prominent, len(captured.heads)),
    }


def _inactive(captured: Captured, seed: int) -> dict[str, Any]:
    """Thresholds, shares by layer, and how far the scores agree (P3.11 to P3.20)."""
    scores = all_scores(captured, seed)
    found: dict[str, Any] = {"thresholds": {}, "share_by_layer": {}, "quantiles": {}}
    for name, values in scores.items():
        taus = {f"{share:g}": threshold(name, values, share) for share in SHARES}
        found["thresholds"][name] = taus
        found["quantiles"][name] = np.nanquantile(values, np.linspace(0, 1, 101))
        mask = inactive(name, values, taus[f"{LAYER_SHARE:g}"])
        found["share_by_layer"][name] = share_by_layer(mask, values)
    iou, precision = agreement(scores, AGREEMENT_SHARE)
    found["agreement"] = {"scores": list(scores), "iou": iou, "precision": precision}
    return found


def clean(value: Any) -> Any:
    """Plain lists and numbers; NaN, which JSON does not have, as null."""
    if isinstance(value, dict):
        return {key: clean(entry) for key, entry in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray):
        return clean(value.tolist())
    if isinstance(value, list | tuple):
        return [clean(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
