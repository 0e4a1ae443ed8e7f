"""Read the metrics.jsonl of a run, without numpy, so that a wrong folder fails immediately."""

import json
from pathlib import Path
from typing import Any

from megasink.checkpoints.find import runs_in
from megasink.errors import UserError

# {key that is drawn or summarized: axes of its value}; a number may be missing (null).
_AXES = {
    **dict.fromkeys(("lm_loss", "valid_lm_loss", "valid_bits_per_byte", "imbalance"), 0),
    **dict.fromkeys(("tokens", "seconds", "loss_spikes"), 0),
    **dict.fromkeys(("imbalance_per_layer", "layers"), 1),
    "importance": 2,
}
_KINDS = ("a number", "a list of numbers", "a table of numbers")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        if (run_dir / "config.json").is_file():
            raise UserError(f"{run_dir} has no {path.name}: it has not trained a step yet")
        runs = runs_in(run_dir, path.name)
        raise UserError(f"{run_dir} {runs or f'is not a run: it has no {path.name}'}")
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} line {number} is not JSON: {error}") from error
        _check(lines[-1], f"{path} line {number}")
    if not any(line.get("lm_loss") is not None for line in lines):
        raise UserError(f"{path} has no training step with a loss yet")
    for key, axes in _AXES.items():
        sizes = {_shape(line[key], axes) for line in lines if line.get(key) is not None}
        if len(sizes) > 1:
            raise UserError(f"{path}: {key} has different sizes in different lines")
    return lines


def _check(line: object, where: str) -> None:
    if not isinstance(line, dict) or not isinstance(line.get("iteration"), int):
        raise UserError(f"{where} is not a line of metrics: it has no iteration")
    for key, axes in _AXES.items():
        if line.get(key) is not None and _shape(line[key], axes) is None:
            raise UserError(f"{where}: {key} is {line[key]!r:.80}, not {_KINDS[axes]}")
    rows = len(line.get("layers") or [])
    for key in ("imbalance_per_layer", "importance"):
        if rows and line.get(key) and len(line[key]) != rows:
            raise UserError(f"{where}: {key} has {len(line[key])} rows, but `layers` has {rows}")


def _shape(value: object, axes: int) -> tuple[int, ...] | None:
    """Return the sizes of a value with this many axes; None if it has others or is empty."""
    if not axes:
        return () if isinstance(value, int | float | None) else None
    if not isinstance(value, list) or not value:
        return None
    inner = {_shape(entry, axes - 1) for entry in value}
    shape = inner.pop()
    return None if inner or shape is None else (len(value), *shape)
