"""Build the records of metrics.jsonl, and the TensorBoard and W&B scalars derived from them.

Scalars come only from the records, so TensorBoard and W&B show nothing that metrics.jsonl lacks.
docs/observing.md defines each.

Shapes: L layers with heads, H query heads.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasink.balance import gate_sums
from megasink.megatron.hybrid_pattern import blocks_of, with_heads
from megasink.training.metrics_file import RATIO


def is_observed(args: Namespace, iteration: int) -> bool:
    """Return whether to record a step's details: every --log-interval steps, and the last step."""
    return bool(iteration % args.log_interval == 0 or iteration == args.train_iters)


class HeadRows(NamedTuple):
    """The rows of the records: the `blocks` with heads; None if row i is block i."""

    blocks: list[int] | None = None

    @property
    def rows(self) -> Sequence[int] | slice:
        """Their rows in the model's statistics, which have one for every block."""
        return slice(None) if self.blocks is None else self.blocks

    @classmethod
    def of(cls, pattern: str | None) -> "HeadRows":
        """Return the rows of a model with --hybrid-layer-pattern, or of one without."""
        found = [*with_heads(pattern or "")]
        every = len(found) == len(blocks_of(pattern or ""))
        return cls(None if every else found)

    def names(self) -> dict[str, list[int]]:
        """Return the entry of a record that names the block of each row, if needed."""
        return {} if self.blocks is None else {"layers": self.blocks}


class HostCopy:
    """A copy to pinned memory, started now and read later, of values that do not change."""

    def __init__(self, values: Tensor):
        # To the host, `non_blocking` allocates pinned memory.
        self._values = values.detach().to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda and self._values is not values:
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def is_here(self) -> bool:
        """Whether `read` returns without waiting."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> Tensor:
        """Return the values on the host; wait for the device if necessary."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        return self._values


class StepValues:
    """The values of a step, copied to the host at once; None for a missing loss or statistics."""

    def __init__(
        self, lm_loss: Tensor | None, statistics: gate_sums.HeadStatistics | None, rows: HeadRows
    ):
        tensors = [] if lm_loss is None else [lm_loss]
        if statistics is not None:
            tensors += [
                statistics.importance_LH,
                statistics.imbalance_L,
                statistics.imbalance,
                statistics.balance_loss,
                *statistics.series.values(),
            ]
        self._rows, self._has_loss = rows.rows, lm_loss is not None
        self._series = None if statistics is None else [*statistics.series]
        self._shapes = [tensor.shape for tensor in tensors]
        self._copy: HostCopy | None = None
        if tensors:
            flat = [tensor.detach().flatten().double() for tensor in tensors]
            self._copy = HostCopy(torch.cat(flat))

    @property
    def are_here(self) -> bool:
        """Whether `read` returns without waiting for the device."""
        return self._copy is None or self._copy.is_here

    def read(self) -> tuple[float | None, gate_sums.HeadStatistics | None]:
        """Return the loss, and the statistics in float64; None if no layer recorded any."""
        if self._copy is None:
            return None, None
        parts = self._copy.read().split([shape.numel() for shape in self._shapes])
        read = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        loss = float(read.pop(0)) if self._has_loss else None
        if self._series is None or not _recorded(read[0]):
            return loss, None
        series = {n: t[self._rows] for n, t in zip(self._series, read[4:], strict=True)}
        importance_LH, imbalance_L, imbalance, balance_loss = read[:4]
        rows = self._rows
        return loss, gate_sums.HeadStatistics(
            importance_LH[rows], imbalance_L[rows], imbalance, balance_loss, series
        )


def head_record(statistics: gate_sums.HeadStatistics, *, details: bool) -> dict[str, Any]:
    """Return the head metrics of a step's record; `details` only on observed steps."""
    record: dict[str, Any] = {
        "balance_loss": number(statistics.balance_loss),
        "imbalance": number(statistics.imbalance),
        "imbalance_per_layer": rounded(statistics.imbalance_L),
    }
    if not details:
        return record
    record["importance"] = rounded(statistics.importance_LH)
    series = {name: values for name, values in statistics.series.items() if _recorded(values)}
    if gate_sums.SINK in series:
        record["softmax_offset"] = rounded(series[gate_sums.SINK])
    if (gate_LH := series.get(gate_sums.GATE)) is not None:
        # As many heads as the gate has: the groups for a key or value gate, one for the output.
        record["explicit_gate"] = rounded(gate_LH[:, ~gate_LH.isnan().all(0)])
    # A step that fp16's loss scale skips has gradients of NaN: nothing to compare with.
    if {gate_sums.BALANCE_GRADIENT, gate_sums.OTHER_GRADIENT} <= series.keys():
        balance_LH, other_LH = series[gate_sums.BALANCE_GRADIENT], series[gate_sums.OTHER_GRADIENT]
        record[RATIO] = number(_ratio(balance_LH.flatten(), other_LH.flatten()))
        record[f"{RATIO}_per_layer"] = rounded(_ratio(balance_LH, other_LH))
    return record


def sink_record(
    prefix: str, first_key_LH: Tensor, slot_LH: Tensor
) -> dict[str, float | list[Any] | None]:
    """Return Sink^0.3 of "valid" or "test" in percent, over all heads and per layer (P2.2)."""
    record: dict[str, float | list[Any] | None] = {}
    for name, rate_LH in (("first_key", first_key_LH), ("slot", slot_LH)):
        if _recorded(rate_LH):
            record[f"{prefix}_sink_rate_{name}"] = number(100 * rate_LH.nanmean())
            record[f"{prefix}_sink_rate_{name}_per_layer"] = rounded(100 * rate_LH.mean(1))
    return record


def head_scalars(record: dict[str, Any]) -> dict[str, float]:
    """Return {name in TensorBoard and W&B: value} for a record with details."""
    scalars: dict[str, float] = {}
    for key, name in (("loss_spikes", "loss spikes"), (RATIO, "balance gradient ratio")):
        if record.get(key) is not None:
            scalars[name] = float(record[key])
    for key, name in (
        ("imbalance_per_layer", "head imbalance"),
        (f"{RATIO}_per_layer", "balance gradient ratio"),
    ):
        for layer, value in _by_block(record, key):
            if value is not None:
                scalars[f"{name} by layer/{layer}"] = value
    for key in ("importance", "softmax_offset", "explicit_gate"):
        name = "head importance" if key == "importance" else key.replace("_", " ")
        for layer, row in _by_block(record, key):
            if values := [value for value in row if value is not None]:
                scalars[f"{name} mean by layer/{layer}"] = sum(values) / len(values)
                scalars[f"{name} min by layer/{layer}"] = min(values)
                scalars[f"{name} max by layer/{layer}"] = max(values)
    return scalars


def _by_block(record: dict[str, Any], key: str) -> list[tuple[int, Any]]:
    """Return [(block, row)] of an entry of a record; [] if the record lacks it."""
    rows = record.get(key, [])
    return list(zip(record.get("layers", range(len(rows))), rows, strict=True)) if rows else []


def sink_scalars(record: dict[str, Any], split: str) -> dict[str, float]:
    """Return {name: value} for the result of :func:`sink_record`, in percent."""
    prefix, word = f"{split}_sink_rate_", "validation" if split == "valid" else split
    return {
        f"sink rate {key.removeprefix(prefix).replace('_', ' ')} {word}": value
        for key, value in record.items()
        if key.startswith(prefix) and isinstance(value, float)
    }


def _ratio(balance: Tensor, other: Tensor) -> Tensor:
    """Return the ratio of norms over the last dimension; NaN where the other gradient is 0."""
    other_norm = other.double().norm(dim=-1)
    return (balance.double().norm(dim=-1) / other_norm).where(other_norm > 0, math.nan)


def _recorded(values: Tensor) -> bool:
    return not bool(values.isnan().all())


def number(value: Any) -> float | None:
    """Convert to a float for JSON; None if missing or not finite."""
    if value is None:
        return None
    result = float(value)
    return result if math.isfinite(result) else None


def rounded(tensor: Tensor) -> list[Any]:
    """Convert to nested lists for JSON, with six digits: enough for a gate mean, half the bytes."""
    if tensor.dim() > 1:
        return [rounded(row) for row in tensor.cpu()]
    values = tensor.double().tolist()
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
