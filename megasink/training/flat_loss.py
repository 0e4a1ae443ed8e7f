"""Say when a loss stays where it began, at that of guessing: with too high a rate it does."""

import math
from pathlib import Path
from typing import Any

from megasink.errors import UserError
from megasink.json_file import read_object

STEPS = 20
_NEAR = 0.01  # of the loss


class FlatLoss:
    """Follows the lines of a run's metrics.jsonl.

    Args:
        run_dir: whose config.json has the rate and the vocabulary, once the ranks have started.
    """

    def __init__(self, run_dir: Path):
        self._config = run_dir / "config.json"
        self._facts: tuple[float, int, int] | None = None
        self._steps = 0

    def add(self, line: dict[str, Any]) -> str | None:
        """Return a sentence at the last of STEPS steps at ln V in a row; else None.

        Steps at less than half of --lr do not count: a warm-up learns little.
        """
        loss, rate = line.get("lm_loss"), line.get("learning_rate")
        if loss is None or rate is None:
            return None
        self._facts = self._facts or self._read()
        peak, tokens, rows = self._facts
        low, high = math.log(tokens) * (1 - _NEAR), math.log(rows) * (1 + _NEAR)
        self._steps = self._steps + 1 if rate >= peak / 2 and low <= loss <= high else 0
        if self._steps != STEPS:
            return None
        return (
            f"the loss has stayed at {loss:.2f} for {STEPS} steps, that of guessing among "
            f"{tokens:,} tokens (ln V): lower --lr {peak:g}, or look at the data"
        )

    def _read(self) -> tuple[float, int, int]:
        """Return --lr, the tokens of the vocabulary and the rows of the embedding."""
        try:
            given = read_object(self._config)["arguments"]
            rows = int(given["padded_vocab_size"])
            return float(given["lr"]), int(given["vocab_size"] or rows), rows
        except (UserError, KeyError, TypeError, ValueError):
            return math.inf, 1, 1  # of another version: nothing is said
