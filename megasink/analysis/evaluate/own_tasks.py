"""The documents of megasink's own tasks, as the YAML files in `tasks` name them."""

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "tasks"


def choices(**_: Any) -> dict[str, Any]:
    """Return the items of docstrings_choice: context, choices and the number of the answer."""
    return _dataset("docstrings_choice.json")


def texts(**_: Any) -> dict[str, Any]:
    """Return the items of docstrings_perplexity: text."""
    return _dataset("docstrings_perplexity.json")


def _dataset(name: str) -> dict[str, Any]:
    from datasets import Dataset

    items = json.loads((_FOLDER / name).read_text(encoding="utf-8"))
    return {"test": Dataset.from_list(items)}
