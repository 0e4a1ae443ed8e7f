"""Functions named in the YAML files of `tasks`: documents, questions and scores."""

import json
import re
import statistics
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


def critique(doc: dict[str, Any]) -> str:
    """Return the question about a solution of ProcessBench: where its first error is."""
    steps = "\n\n".join(
        f"<paragraph_{i}>\n{step}\n</paragraph_{i}>" for i, step in enumerate(doc["steps"])
    )
    return (
        "Here is a mathematical problem and a solution, in paragraphs that are numbered from 0.\n\n"
        f"[Math Problem]\n\n{doc['problem']}\n\n[Solution]\n\n{steps}\n\n"
        "Review the solution paragraph by paragraph. Give the number of the paragraph with the "
        "earliest error, or -1 if there is none. Put it in \\boxed{}."
    )


def judged(doc: dict[str, Any], results: list[str]) -> dict[str, tuple[bool, bool]]:
    """Return whether a solution of ProcessBench has an error, and whether the answer is right."""
    boxed = re.findall(r"\\boxed\{([^}]*)\}", results[0])
    right = bool(boxed) and boxed[-1].strip() == str(doc["label"])
    return {"critique_f1": (doc["label"] != -1, right)}


def critique_f1(items: list[tuple[bool, bool]]) -> float:
    """Return ProcessBench's F1: the harmonic mean of the accuracies with and without an error."""
    accuracies = [
        sum(kind) / len(kind)
        for kind in (
            [right for has_error, right in items if has_error is of] for of in (True, False)
        )
        if kind  # one is missing among a few documents
    ]
    return statistics.harmonic_mean(accuracies)
