"""Check whether analyses shown together were measured in the same way."""

from collections.abc import Sequence
from typing import Any

from megasink.report.analysis import Analysis

_OPTIONS = {
    "seq_length": "different sequence lengths (--seq-length)",
    "data": "different texts (--data)",
    "inputs": "different inputs (--inputs)",
    "bos": "different BOS settings (--bos)",
    "replaced_positions": "different replaced tokens (--replace-tokens-at)",
    "replaced_with": "different tokens in their place (--replace-tokens-with)",
    "max_samples": "different sample limits (--max-samples)",
}


def differences(analyses: Sequence[Analysis]) -> list[str]:
    """Return one phrase per difference between the analyses' samples; none for one analysis.

    Different token ids alone do not count: models have their own tokenizers.
    """
    same_tokens = len({a.results.run.data_sha256 for a in analyses}) == 1
    sentences = []
    for key, what in _OPTIONS.items():
        values = [_shown(getattr(a.results.run, key)) for a in analyses]
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
