"""Classes that a pickle names and that are not made: an empty stand-in takes their place.

Arguments of a run, random states and optimizers come as objects of many classes, of which only
plain values are ever read. What no checkpoint has a use for (os.system, eval, ...) is refused.
"""

import sys
from typing import Any

# Modules of Python that arguments, random states and enumerations come from; others are refused.
_KNOWN = {"argparse", "collections", "types", "enum", "signal", "pathlib", "io", "_codecs"}
_KNOWN_BUILTINS = {"set", "frozenset", "bytearray", "complex", "slice", "range", "getattr"}


class StandIn:
    """Instead of an object of any class: remembers its fields, and does nothing."""

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
        """Of a list."""

    def extend(self, values: Any) -> None:
        """Of a list."""

    def add(self, value: Any) -> None:
        """Of a set."""


def stand_in(module: str, name: str) -> type[StandIn] | None:
    """A class to make in place of ``module.name``; None for what no checkpoint names."""
    top = module.partition(".")[0]
    if top in ("builtins", "__builtin__"):  # the latter in the pickles of torch.save
        allowed = name in _KNOWN_BUILTINS
    else:
        allowed = top in _KNOWN or top not in sys.stdlib_module_names
    return type(name, (StandIn,), {"__module__": module}) if allowed else None
