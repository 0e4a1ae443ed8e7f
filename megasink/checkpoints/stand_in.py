"""Empty stand-ins for the classes named in a pickle.

A run's arguments, random states and optimizers are pickled as objects of many classes, but only
plain values are read. Names that no checkpoint needs (os.system, eval, ...) are refused.
"""

import sys
from typing import Any

# Standard library modules that arguments, random states and enums need; others are refused.
_KNOWN = {"argparse", "collections", "types", "enum", "signal", "pathlib", "io", "_codecs"}
_KNOWN_BUILTINS = {"set", "frozenset", "bytearray", "complex", "slice", "range", "getattr"}


class StandIn:
    """Placeholder for an object of any class: keeps its fields, and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "StandIn":
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Ignore a list item."""

    def extend(self, values: Any) -> None:
        """Ignore list items."""

    def add(self, value: Any) -> None:
        """Ignore a set item."""


def stand_in(module: str, name: str) -> type[StandIn] | None:
    """Return a class to replace ``module.name``; None if no checkpoint should name it."""
    top = module.partition(".")[0]
    if top in ("builtins", "__builtin__"):  # the latter is in torch.save's pickles
        allowed = name in _KNOWN_BUILTINS
    else:
        allowed = top in _KNOWN or top not in sys.stdlib_module_names
    return type(name, (StandIn,), {"__module__": module}) if allowed else None
