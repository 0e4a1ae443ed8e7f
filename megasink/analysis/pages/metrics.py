"""Read the metrics.jsonl of a run; without numpy, so that a wrong folder is refused at once."""

import json
from pathlib import Path
from typing import Any

from megasink.errors import UserError

_NUMBERS = ("lm_loss", "valid_lm_loss", "valid_bits_per_byte", "imbalance", "tokens")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl.

    Raises:
        UserError: the file is missing, empty, or not JSON lines.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run_dir} is not a run: {path} not found")
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} line {number} is not JSON: {error}") from error
        _check(lines[-1], f"{path} line {number}")
    if not any("lm_loss" in line for line in lines):
        raise UserError(f"{path} has no training step yet")
    return lines


def _check(line: object, where: str) -> None:
    if not isinstance(line, dict) or not isinstance(line.get("iteration"), int):
        raise UserError(f"{where} is not a line of metrics: it has no iteration")
    for key in _NUMBERS:
        if not isinstance(line.get(key), int | float | None):
            raise UserError(f"{where}: {key} is {line[key]!r}, not a number")
