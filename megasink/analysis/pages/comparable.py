"""Check that analyses on one page have distinct names and comparable measurements."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasink.console.printable import printable
from megasink.errors import UserError

if TYPE_CHECKING:
    from megasink.analysis.analysis import Analysis

_OPTIONS = {
    "seq_length": "different sequence lengths (--seq-length)",
    "random_lengths": "different random lengths (--random-lengths)",
    "data": "different texts (--data)",
    "inputs": "different inputs (--inputs)",
    "bos": "different BOS settings (--bos)",
    "replaced_positions": "different replaced tokens (--replace-tokens-at)",
    "replaced_with": "different tokens in their place (--replace-tokens-with)",
    "max_samples": "different sample limits (--max-samples)",
}


def shortest_names(paths: Sequence[Path], what: str) -> list[str]:
    """Return the shortest path suffixes that distinguish the folders, printable."""
    resolved = [path.resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        raise UserError(f"{what} is given twice: pass each once")
    for depth in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(names):
            break
    return [printable(name) for name in names]


def name_apart(analyses: Sequence["Analysis"], folders: Sequence[Path]) -> None:
    """Add the folder to each name that several analyses have."""
    counts = Counter(analysis.name for analysis in analyses)
    for analysis, folder in zip(analyses, shortest_names(folders, "an analysis"), strict=True):
        if counts[analysis.name] > 1:
            analysis.name += f" ({folder})"


def differences(analyses: Sequence["Analysis"]) -> list[str]:
    """Return one phrase per difference between the analyses' samples; none for one analysis.

    Different token ids alone do not count: models have their own tokenizers.
    """
    same_tokens = len({a.results.run.data_sha256 for a in analyses}) == 1
    sentences = []
    for key, what in _OPTIONS.items():
        values = [_shown(getattr(a.results.run, key)) for a in analyses]
        if key == "inputs":  # the other kinds stand apart
            values = [next(iter(a.results.run.inputs), "") for a in analyses]
        if len(set(values)) == 1 or (same_tokens and key != "seq_length"):
            continue
        named = ", ".join(f"{a.name}: {value}" for a, value in zip(analyses, values, strict=True))
        sentences.append(f"{what}: {named}; compare only numbers measured in the same way")
    counts = [a.results.samples for a in analyses]
    if not sentences and len(set(counts)) > 1:
        named = ", ".join(f"{a.name}: {n}" for a, n in zip(analyses, counts, strict=True))
        sentences.append(f"different numbers of samples: {named}")
    return sentences


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
