"""The whole model from the parts that the ranks return. Runs in the test process: no megatron."""

from typing import Any

import numpy as np
from numpy import ndarray


def whole(parts: list[dict[str, dict[str, Any]]]) -> dict[str, ndarray]:
    """Put the shards of every rank together.

    Args:
        parts: by rank, {name in the whole model: tensor, tp_rank, tensor_parallel, axis}.

    Returns:
        {name: whole tensor}.

    Raises:
        AssertionError: copies of the same shard on different ranks are not equal to the bit.
    """
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for part in parts:
        for name, shard in part.items():
            known = by_name.setdefault(name, {}).setdefault(shard["tp_rank"], shard)
            assert np.array_equal(known["tensor"], shard["tensor"]), f"replicas of {name} differ"
    return {name: _merge(name, shards) for name, shards in by_name.items()}


def _merge(name: str, shards: dict[int, dict[str, Any]]) -> ndarray:
    tensors = [shards[rank]["tensor"] for rank in sorted(shards)]
    first = shards[0]
    if not first["tensor_parallel"]:
        for tensor in tensors[1:]:
            assert np.array_equal(tensor, tensors[0]), f"copies of {name} differ"
        return tensors[0]
    if first["stride"] == 2:
        # A gated unit: every shard is [gate; up] of its own columns.
        halves = [np.split(tensor, 2) for tensor in tensors]
        return np.concatenate([gate for gate, _ in halves] + [up for _, up in halves])
    return np.concatenate(tensors, first["axis"])


def loss(reports: list[dict[str, Any]]) -> list[float]:
    """The loss of every step over the targets of all ranks that have some: [(sum, number), ..]."""
    steps = zip(*(report["loss"] for report in reports), strict=True)
    known = [np.array([value for value in step if value is not None]) for step in steps]
    return [float(values[:, 0].sum() / values[:, 1].sum()) for values in known]


def relative_error(array: ndarray, reference: ndarray) -> float:
    """|a - b| / |b| in the 2-norm, in float64."""
    difference = np.asarray(array, np.float64) - np.asarray(reference, np.float64)
    size = np.linalg.norm(np.asarray(reference, np.float64))
    return float(np.linalg.norm(difference) / size) if size else float(np.linalg.norm(difference))


def assert_same_training(
    reports: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float
) -> None:
    """What the ranks of two layouts report is the same, initial weights to the bit."""
    np.testing.assert_allclose(loss(reports), loss(expected), rtol=tolerance)
    for report in reports:  # every rank knows the statistics and the norm of the whole model
        np.testing.assert_allclose(report["grad_norm"], expected[0]["grad_norm"], rtol=tolerance)
        for found, wanted in zip(report["statistics"], expected[0]["statistics"], strict=True):
            for key in wanted:
                # The imbalance is a difference of importances near 1, in float32.
                absolute = 1e-7 if key.startswith("imbalance") else 0.0
                np.testing.assert_allclose(
                    found[key], wanted[key], tolerance, absolute, err_msg=key
                )
    assert_same_weights(reports, expected, 0.0, "initial")
    assert_same_gradients(reports, expected, tolerance)
    assert_same_weights(reports, expected, tolerance, "final")


def assert_same_gradients(
    reports: list[dict[str, Any]],
    expected: list[dict[str, Any]],
    tolerance: float,
    scale: float = 1.0,
) -> None:
    """Each gradient is the expected one times `scale`, and so is there."""
    assert_same_weights(reports, expected, tolerance, "gradients", scale)


def assert_same_weights(
    reports: list[dict[str, Any]],
    expected: list[dict[str, Any]],
    tolerance: float,
    kind: str,
    scale: float = 1.0,
) -> None:
    """A tensor for each parameter is the same; to the bit if the tolerance is 0."""
    found, wanted = (whole([r[kind] for r in rs]) for rs in (reports, expected))
    assert found.keys() == wanted.keys()
    errors = {n: relative_error(found[n] / scale, wanted[n]) for n in wanted}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= tolerance, f"{kind} of {worst}: {errors[worst]:.2e}"
