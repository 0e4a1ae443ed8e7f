"""The PREFIX.json of a data set: how it was made; checked before training on it."""

from pathlib import Path
from typing import Any

from megasink.errors import UserError
from megasink.json_file import read_object


def mismatch(prefix: str, sha256: str, name: str) -> str | None:
    """Return why a data set does not match a tokenizer; None if it does or has no sidecar.

    Args:
        prefix: path of the data set without ``.bin``.
        sha256: `tokenizer_hash` of the tokenizer. It takes as long as its vocabulary is large, so
            the caller computes it once for all data sets.
        name: the tokenizer in the message.
    """
    sidecar = Path(f"{prefix}.json")
    if not sidecar.is_file():
        return None  # made by Megatron's own tool
    found = read_sidecar(prefix).get("tokenizer")
    if not isinstance(found, dict) or not isinstance(found.get("sha256"), str):
        return f"{sidecar} does not describe a data set: make the data set again"
    if found["sha256"] == sha256:
        return None
    return (
        f"made with the tokenizer {found.get('folder')}, whose tokens differ from those of "
        f"{name}: train with that tokenizer or make the data set again"
    )


def read_sidecar(prefix: str) -> dict[str, Any]:
    """Return its contents; empty if it is missing, or not a sidecar."""
    try:
        return read_object(Path(f"{prefix}.json"))
    except UserError:
        return {}
