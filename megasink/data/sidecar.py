"""The PREFIX.json beside a data set: what it was made with, read back before training on it."""

import json
from pathlib import Path
from typing import Any

from megasink.data.tokenizer import tokenizer_hash


def mismatch(prefix: str, tokenizer: Any) -> str | None:
    """Why a data set was not made with this tokenizer; None if it was, or has no sidecar.

    Args:
        prefix: path of the data set without ``.bin``.
        tokenizer: a loaded tokenizer.
    """
    sidecar = Path(f"{prefix}.json")
    if not sidecar.is_file():
        return None  # made by Megatron's own tool
    try:
        made_with = json.loads(sidecar.read_text())["tokenizer"]
    except (ValueError, KeyError, TypeError):
        return f"{sidecar} is not the description of a data set: make the data set again"
    if made_with["sha256"] == tokenizer_hash(tokenizer):
        return None
    return (
        f"made with the tokenizer {made_with['folder']}, whose tokens are not those of "
        f"{tokenizer.name_or_path}: train with that one or make the data set again"
    )
