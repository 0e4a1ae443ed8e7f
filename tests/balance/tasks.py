"""Tasks for the workers: the tracker alone."""

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megasink.balance.tracker import HeadStatistics, HeadTracker

ROUTED = torch.tensor([True, True])


def ignore(importance_H: Tensor) -> None:
    """What a layer does that shares no heads and has no balance loss."""


def record(
    tracker: HeadTracker, layer: int, importance: list[float], tokens: int, receiver: Any = ignore
) -> None:
    gate_sum_h = torch.tensor(importance) * tokens
    tracker.record(layer, gate_sum_h, tokens, ROUTED, receiver)


def finish(tracker: HeadTracker, coeff: float = 1.0, scope: str = "microbatch") -> HeadStatistics:
    tracker.start_reduction(parallel_state.get_tensor_model_parallel_group())
    statistics = tracker.finish_step(coeff, scope)
    assert statistics is not None
    return statistics


def _rounded(tensor: Tensor) -> Any:
    return [[round(value, 6) for value in row] for row in tensor.tolist()]


def two_microbatches() -> dict[str, Any]:
    """Two layers, microbatches of 10 and 30 tokens."""
    found, tracker = {}, HeadTracker(layers=2, heads=2)
    for key, scope in (("balance_loss", "microbatch"), ("global_loss", "global")):
        for layer in (0, 1):
            record(tracker, layer, [0.2, 0.4], 10)
            tracker.record_loss(layer, torch.tensor(1.0 + layer))
            record(tracker, layer, [0.6, 0.0], 30)
            tracker.record_loss(layer, torch.tensor(3.0))
        statistics = finish(tracker, 0.5, scope)
        found[key] = float(statistics.balance_loss)
    found["importance"] = _rounded(statistics.importance_LH)
    found["imbalance"] = float(statistics.imbalance)
    return found


def two_steps() -> list[Any]:
    """The importance of each."""
    found, tracker = [], HeadTracker(layers=1, heads=2)
    for value in (0.9, 0.3):
        record(tracker, 0, [value, value], 8)
        found.append(_rounded(finish(tracker).importance_LH))
    return found


def rerun() -> dict[str, Any]:
    """A step whose forward and backward pass ran twice before it ended."""
    received: list[Tensor] = []
    tracker, tp_group = HeadTracker(1, 2), parallel_state.get_tensor_model_parallel_group()
    for value in (0.9, 0.3):
        record(tracker, 0, [value, value], 8, received.append)
        tracker.start_reduction(tp_group)
    statistics = tracker.finish_step(1.0, "global")
    return {"importance": _rounded(statistics.importance_LH), "received": len(received)}


def missing_layer() -> dict[str, Any]:
    """Only the second of two layers recorded."""
    tracker = HeadTracker(layers=2, heads=2)
    record(tracker, 1, [0.5, 0.5], 8)
    statistics = finish(tracker, scope="global")
    first, second = statistics.importance_LH
    return {
        "first": bool(first.isnan().all()),
        "second": second.tolist(),
        "loss": float(statistics.balance_loss),
    }


def many_microbatches() -> float:
    """Relative error after 3000 of them."""
    value, tracker = torch.tensor([0.1, 0.7]), HeadTracker(layers=1, heads=2)
    for _ in range(3000):
        tracker.record(0, value.double() * 4097, 4097, ROUTED, ignore)
    return float((finish(tracker).importance_LH[0] / value - 1).abs().max())


def graph() -> bool:
    """Whether a record keeps the graph of the gate alive."""
    gate_sum_h = torch.tensor([0.5, 0.25], requires_grad=True) * 1
    tracker = HeadTracker(layers=1, heads=2)
    tracker.record(0, gate_sum_h, 1, ROUTED, ignore)
    tracker.record_loss(0, gate_sum_h.sum())
    return tracker._rows[0].requires_grad


def finish_without_records() -> dict[str, Any]:
    """The statistics of a step in which nothing was recorded."""
    tracker = HeadTracker(layers=2, heads=2)
    statistics = finish(tracker)
    return {
        "nan": bool(statistics.importance_LH.isnan().all()),
        "balance_loss": float(statistics.balance_loss),
        "again": tracker.finish_step(1.0, "global") is None,
    }
