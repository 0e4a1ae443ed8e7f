"""Change the outputs of heads or the input tokens of a model, and measure the effect.

A file of heads or interventions is checked before torch is imported, except for the range of a
score's thresholds, which the metrics define with torch.
"""

import importlib
from typing import Any

_MODULES = {
    "dynamic_zeroing": ("DynamicChange",),
    "entries": ("from_entry", "read_interventions", "to_entry"),
    "heads": ("heads_of", "read_heads"),
    "kinds": (
        "DrainFirstValue",
        "DynamicZeroing",
        "RemoveBos",
        "RepeatFirstToken",
        "SteerGates",
        "ZeroHeads",
    ),
    "record": ("Intervention",),
}
__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
