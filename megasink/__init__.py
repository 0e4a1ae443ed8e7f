"""Attention heads gated by an attention sink or a sigmoid gate, on Megatron-Core.

The names below are the public Python API (docs/python.md); each is imported when it is first used.
Commands are `megasink COMMAND`.
"""

from typing import TYPE_CHECKING, Any

from megasink.api import NAMES

if TYPE_CHECKING:
    from megasink.api.analysis import Analysis, MetricValues, Plot, read_analysis
    from megasink.api.analyze import analyze
    from megasink.api.models import convert_to_hf, load_model, load_run
    from megasink.intervene.python import (
        drain_first_value,
        dynamic_zeroing,
        intervening,
        steer_gates,
        zero_heads,
    )
    from megasink.transformers import HeadBalance, HeadBalanceCallback

__version__: str
__all__ = [
    "Analysis",
    "HeadBalance",
    "HeadBalanceCallback",
    "MetricValues",
    "Plot",
    "analyze",
    "convert_to_hf",
    "drain_first_value",
    "dynamic_zeroing",
    "intervening",
    "load_model",
    "load_run",
    "read_analysis",
    "steer_gates",
    "zero_heads",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:  # that of the last tag, when it was installed
            return version("megasink")
        except PackageNotFoundError:
            return "0+unknown"
    if name not in NAMES:
        raise AttributeError(f"module 'megasink' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(NAMES[name]), name)


def __dir__() -> list[str]:
    return __all__
