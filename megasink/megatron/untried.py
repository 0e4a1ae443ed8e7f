"""Check that Megatron-Core is a version with which the layer spec and the loss were tested."""

import warnings

from megasink.errors import UserError
from megasink.tried import HEART, numbers_of

_RANGE = f"megasink.megatron was tested with {HEART[0]} to {HEART[1]}"


def lacking(error: ImportError) -> UserError:
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


def warn() -> None:
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
