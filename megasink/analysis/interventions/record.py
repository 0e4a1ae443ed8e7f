"""What an intervention is: a frozen dataclass of what is changed, which can be written as JSON.

Every kind is one class, registered by its name; files, commands and the cache of a sweep read the
registry. An intervention holds no state: `change` makes the object that runs (`HeadChange`).
"""

import dataclasses
import importlib
from abc import ABC
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megasink.errors import UserError
from megasink.json_file import read_value

if TYPE_CHECKING:
    from megasink.analysis.capture.changes import HeadChange

KINDS: dict[str, type["Intervention"]] = {}
# Kind -> the module here that registers it, with torch.
BUILT_IN = {
    "drain-first-value": "drain_first_value",
    "dynamic-zeroing": "dynamic_zeroing",
    "remove-bos": "tokens",
    "repeat-first-token": "tokens",
    "steer-gates": "steer_gates",
    "zero-heads": "zero_heads",
}


class Intervention(ABC):
    """Base of all kinds; a subclass is a frozen dataclass with JSON values, and names its `kind`.

    Attributes:
        kind: its name in files and messages.
        source: rows of the papers.
    """

    kind: ClassVar[str]
    source: ClassVar[str]

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if cls.kind in KINDS:
            raise ValueError(f"intervention {cls.kind!r} is registered twice")
        KINDS[cls.kind] = cls

    def change(self) -> "HeadChange | None":
        """Return a fresh change of the heads' outputs; None if only the tokens are changed."""
        return None

    def tokens(self, tokens: Sequence[int], bos: int | None) -> list[int]:
        """Return the tokens that the model reads instead.

        Args:
            tokens: one sequence, BOS included where the model has it.
            bos: id of BOS; None if the tokenizer has none.
        """
        return list(tokens)


def changes_of(interventions: Iterable[Intervention]) -> "list[HeadChange]":
    """Return fresh changes of those interventions that change heads."""
    return [change for each in interventions if (change := each.change()) is not None]


def to_entry(intervention: Intervention) -> dict[str, Any]:
    """Return an intervention as a JSON object, such as {"kind": "zero-heads", ...}."""
    fields: Any = dataclasses.asdict(intervention)  # type: ignore[call-overload]
    return {"kind": intervention.kind} | fields


def from_entry(entry: dict[str, Any], where: str) -> Intervention:
    """Return the intervention that a JSON object describes.

    Args:
        where: the file and entry, for errors.

    Raises:
        UserError: an unknown kind, an unknown or missing field, or a wrong value.
    """
    kind = entry.get("kind")
    kind = kind if isinstance(kind, str) else repr(kind)
    if kind in BUILT_IN:
        importlib.import_module(f"{__package__}.{BUILT_IN[kind]}")
    if kind not in KINDS:
        known = ", ".join({**BUILT_IN, **KINDS})
        raise UserError(f"{where}: kind {kind!r} is unknown: choose {known}")
    given = {name: value for name, value in entry.items() if name != "kind"}
    try:
        return KINDS[kind](**given)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} ({kind}): {error}") from error


def read_interventions(path: Path) -> list[Intervention]:
    """Return the interventions of a JSON file: a list of objects, applied in order.

    Raises:
        UserError: the file is missing, no such list, or an entry is wrong.
    """
    entries = read_value(path)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path}: write a list of objects, each with a kind")
    return [from_entry(entry, f"{path}, entry {i}") for i, entry in enumerate(entries)]
