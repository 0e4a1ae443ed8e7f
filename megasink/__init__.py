"""Attention heads gated by an attention sink or a sigmoid gate, on Megatron-Core.

The names below are the public Python API (docs/python.md); each is imported when it is first used.
Commands are `megasink COMMAND`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megasink.analysis.analysis_folder import read_analysis
    from megasink.analysis.analysis_object import Analysis, MetricValues, Plot
    from megasink.analysis.api import analyze, convert_to_hf, load_model, load_run
    from megasink.analysis.interventions.activations import activation_names, hooks, run_with_cache
    from megasink.analysis.interventions.context_managers import (
        drain_first_value,
        dynamic_zeroing,
        intervening,
        steer_gates,
        zero_heads,
    )
    from megasink.errors import UserError
    from megasink.transformers import HeadBalanceCallback, HeadBalanceLoss

__version__: str
NAMES = {
    "Analysis": "megasink.analysis.analysis_object",
    "HeadBalanceCallback": "megasink.transformers",
    "HeadBalanceLoss": "megasink.transformers",
    "MetricValues": "megasink.analysis.analysis_object",
    "Plot": "megasink.analysis.analysis_object",
    "UserError": "megasink.errors",
    "activation_names": "megasink.analysis.interventions.activations",
    "analyze": "megasink.analysis.api",
    "convert_to_hf": "megasink.analysis.api",
    "drain_first_value": "megasink.analysis.interventions.context_managers",
    "dynamic_zeroing": "megasink.analysis.interventions.context_managers",
    "hooks": "megasink.analysis.interventions.activations",
    "intervening": "megasink.analysis.interventions.context_managers",
    "load_model": "megasink.analysis.api",
    "load_run": "megasink.analysis.api",
    "read_analysis": "megasink.analysis.analysis_folder",
    "run_with_cache": "megasink.analysis.interventions.activations",
    "steer_gates": "megasink.analysis.interventions.context_managers",
    "zero_heads": "megasink.analysis.interventions.context_managers",
}
"""Public name -> the module that has it; imported when the name is first used."""

__all__ = ["Analysis", "HeadBalanceCallback", "HeadBalanceLoss", "MetricValues", "Plot"]
__all__ += ["UserError", "activation_names", "analyze", "convert_to_hf", "drain_first_value"]
__all__ += ["dynamic_zeroing", "hooks", "intervening", "load_model", "load_run", "read_analysis"]
__all__ += ["run_with_cache", "steer_gates", "zero_heads"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:  # version of the last tag at installation
            return version("megasink")
        except PackageNotFoundError:
            return "0+unknown"
    module = "megasink.transformers" if name == "HeadBalance" else NAMES.get(name)  # an old name
    if module is None:
        raise AttributeError(f"module 'megasink' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return __all__
