"""Change what a model's heads write, or which tokens it reads, and see what that costs.

A file of heads, and a kind of intervention that is none, are refused before torch is imported; what
an intervention of a known kind may hold, its module knows, which imports torch.
"""

import importlib
from typing import Any

_MODULES = {
    "drain_first_value": ("DrainFirstValue",),
    "dynamic_zeroing": ("DynamicChange", "DynamicZeroing"),
    "heads": ("parse_heads", "read_heads"),
    "record": ("Intervention", "from_entry", "read_interventions", "to_entry"),
    "steer_gates": ("SteerGates",),
    "tokens": ("RemoveBos", "RepeatFirstToken"),
    "zero_heads": ("ZeroHeads",),
}
__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
