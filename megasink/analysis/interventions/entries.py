"""Interventions as JSON: read from files, and written into results."""

import dataclasses
from pathlib import Path
from typing import Any

import megasink.analysis.interventions.kinds  # noqa: F401  # registers them
from megasink.analysis.interventions.record import KINDS, Intervention
from megasink.errors import UserError
from megasink.files.json_file import read_value


def to_entry(intervention: Intervention) -> dict[str, Any]:
    """Return an intervention as a JSON object, such as {"kind": "zero-heads", ...}."""
    fields: Any = dataclasses.asdict(intervention)  # type: ignore[call-overload]
    return {"kind": intervention.kind} | fields


def from_entry(entry: dict[str, Any], where: str) -> Intervention:
    """Return the intervention that a JSON object describes; `where` is for errors."""
    kind = entry.get("kind")
    kind = kind if isinstance(kind, str) else repr(kind)
    if kind not in KINDS:
        raise UserError(f"{where}: kind {kind!r} is unknown: choose {', '.join(sorted(KINDS))}")
    given = {name: value for name, value in entry.items() if name != "kind"}
    try:
        return KINDS[kind](**given)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} ({kind}): {error}") from error


def read_interventions(path: Path) -> list[Intervention]:
    """Return the interventions of a JSON file: a list of objects, applied in order."""
    entries = read_value(path)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path}: write a list of objects, each with a kind")
    return [from_entry(entry, f"{path}, entry {i}") for i, entry in enumerate(entries)]
