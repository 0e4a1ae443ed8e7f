"""Attention heads gated by an attention sink or a sigmoid gate, on Megatron-Core.

Contexts that change the heads of a loaded model, imported when first used (docs/interventions.md):
`zero_heads`, `dynamic_zeroing`, `drain_first_value`, `steer_gates`, and `intervening` for several.
"""

from typing import Any

__version__ = "0.1.0"

_CONTEXTS = ("drain_first_value", "dynamic_zeroing", "intervening", "steer_gates", "zero_heads")


def __getattr__(name: str) -> Any:
    if name not in _CONTEXTS:
        raise AttributeError(f"module 'megasink' has no attribute {name!r}")
    from megasink.intervene import python

    return getattr(python, name)


def __dir__() -> list[str]:
    return [*globals(), *_CONTEXTS]
