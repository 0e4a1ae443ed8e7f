"""megasink in any training loop of Megatron-Core: the specs and the head-balance loss.

Three lines in a loop that has a TransformerConfig (docs/megatron.md)::

    from megasink.megatron import HeadBalance, stack_spec

    HeadBalance(config, attention_variant="sink", head_balance_coeff=1e-4).install()
    model = HybridModel(config, stack_spec(config), ..., hybrid_layer_pattern="*-*-")
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from megasink.errors import UserError
from megasink.tried import HEART, numbers_of

if TYPE_CHECKING:
    from megasink.megatron.head_balance import HeadBalance
    from megasink.megatron.hybrid_specs import stack_spec
    from megasink.megatron.specs import layer_spec

__all__ = ["HeadBalance", "layer_spec", "stack_spec"]
_MODULES = {"HeadBalance": "head_balance", "layer_spec": "specs", "stack_spec": "hybrid_specs"}
_RANGE = f"megasink.megatron was tested with {HEART[0]} to {HEART[1]}"


def __getattr__(name: str) -> Any:
    # When they are asked for: modules of this package are also imported before Megatron may be.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:  # Megatron-Core 0.18 has no HybridModel
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ImportError as error:
        raise _lacking(error) from error
    if not globals().keys() & _MODULES.keys():  # once
        _warn()
    # Megatron's import_module looks a spec up in the module's variables (spec_utils.py:56).
    return globals().setdefault(name, getattr(module, name))


def _lacking(error: ImportError) -> UserError:
    """Return the error for a missing import.

    Not an ImportError: Megatron's import_module logs it, and the run continues without the spec
    (core/transformer/spec_utils.py:53).
    """
    if error.name in ("megatron", "megatron.core"):
        return UserError("megatron-core is not installed: pip install 'megasink[train]'")
    if not (error.name or "").startswith("megatron."):
        return UserError(f"megasink.megatron cannot be imported: {error}")
    what = ".".join(part for part in (error.name, error.name_from) if part)
    return UserError(f"megatron-core {_version()} lacks {what}: {_RANGE}")


def _warn() -> None:
    """Warn of a version that lacks a required hook, or that was not tested."""
    from megatron.core.transformer import TransformerConfig

    version = _version()
    if not hasattr(TransformerConfig, "experimental_attention_variant_loss_scale_func"):
        warnings.warn(
            f"megatron-core {version} does not pass the loss scale to layers, and its "
            "pretrain_gpt.py does not call the function of --spec (0.19 does both): call "
            "set_loss_scale of the HeadBalance before every backward pass, and build the model "
            "with layer_spec(config)",
            stacklevel=3,
        )
    elif not numbers_of(HEART[0]) <= numbers_of(version) <= numbers_of(HEART[1]):
        warnings.warn(
            f"megatron-core {version} was not tested: {_RANGE}. All imports work: compare a few "
            "steps with those of a tested version",
            stacklevel=3,
        )


def _version() -> str:
    from megatron import core

    return str(getattr(core, "__version__", "of unknown version")).partition("+")[0]
