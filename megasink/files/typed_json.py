"""Dataclasses to and from JSON, with one-line errors.

Fields may be dataclasses, dict[str, T], list[T], T | None, int, float, str, bool and Any. NaN and
infinity, which JSON lacks, become null.
"""

import dataclasses
import math
import types
import typing
from typing import Any

from megasink.errors import UserError

_PLAIN = {str: "string", bool: "boolean", int: "integer", float: "number", types.NoneType: "null"}


def to_json(value: Any) -> Any:
    """Convert a dataclass, tensor, array or plain value to dicts, lists and plain values."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: to_json(getattr(value, field.name)) for field in fields}
    if isinstance(value, dict):
        return {key: to_json(entry) for key, entry in value.items()}
    if hasattr(value, "tolist"):
        import numpy as np  # an array exists only if numpy is imported

        plain = value.tolist()
        numbers = np.asarray(plain)  # entry by entry only if some are NaN: a million are slow
        finite = numbers.dtype.kind in "fiub" and np.isfinite(numbers).all()
        return plain if finite else to_json(plain)
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(kind: Any, value: Any, where: str) -> Any:
    """Build an instance of a dataclass or field type from JSON."""
    if kind is Any or (kind is float and isinstance(value, int) and not isinstance(value, bool)):
        return value
    if kind in _PLAIN:
        if type(value) is not kind:
            raise UserError(f"{where} is {value!r:.40}, not of type {_PLAIN[kind]}")
        return value
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in inner:
            return None
        choices = [choice for choice in inner if choice is not types.NoneType]
        fitting = next((c for c in choices if type(value) is c), choices[0])
        return from_json(fitting, value, where)
    if origin is list:
        if not isinstance(value, list):
            raise UserError(f"{where} is {value!r:.40}, not a list")
        return [from_json(inner[0], entry, f"{where}[{i}]") for i, entry in enumerate(value)]
    if not isinstance(value, dict):
        raise UserError(f"{where} is {value!r:.40}, not an object")
    if origin is dict:
        return {key: from_json(inner[1], v, f"{where}.{key}") for key, v in value.items()}
    hints = typing.get_type_hints(kind)
    for name in hints:
        if name not in value:
            raise UserError(f"{where} has no {name}")
    if unknown := sorted(value.keys() - hints.keys()):
        raise UserError(f"{where} has the unknown key {unknown[0]}")
    return kind(**{k: from_json(hint, value[k], f"{where}.{k}") for k, hint in hints.items()})
