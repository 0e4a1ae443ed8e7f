"""Optional packages that are installed but do not import: named, and treated as missing.

Megatron tries these imports and expects nothing but ImportError. A wheel for another torch or
another cutlass-dsl raises AttributeError, RuntimeError, OSError, ...
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from megasink.upstream.fused_kernels import APEX, FLASH_ATTENTION_4, TRANSFORMER_ENGINE, broken
from megasink.upstream.versions import version_of


class Optional(NamedTuple):
    """What Megatron imports if it can."""

    module: str  # Module to import
    blocked: str  # Module that must not be imported if that fails
    packages: tuple[str, ...]  # Distributions that may own it, the likeliest first
    cure: str  # Command that installs a version that works
    needed: bool = False  # Whether Megatron does not start without it


_BUILD_FLASH_ATTENTION = "pip install --no-build-isolation --force-reinstall --no-deps flash-attn"
OPTIONAL = (
    Optional(
        "transformer_engine.pytorch",
        "transformer_engine",
        ("transformer-engine",),
        TRANSFORMER_ENGINE.cure,
    ),
    # Its __init__ imports the binary, and FlashAttention 4, which has none, is below it.
    Optional("flash_attn", "flash_attn", ("flash-attn",), _BUILD_FLASH_ATTENTION),
    Optional(
        "flash_attn.cute.interface",
        "flash_attn.cute",
        ("flash-attn-4", "flash-attn"),  # flash-attn 2.8 has an old copy
        FLASH_ATTENTION_4.cure,
    ),
    Optional(
        "flash_attn.layers.rotary", "flash_attn.layers", ("flash-attn",), _BUILD_FLASH_ATTENTION
    ),
    Optional(
        "flash_attn_interface",
        "flash_attn_interface",
        ("flash-attn-3",),
        "build hopper/ of github.com/Dao-AILab/flash-attention for this torch",
    ),
    Optional("apex.optimizers", "apex", ("apex",), APEX.cure),
    Optional("amp_C", "amp_C", ("apex",), APEX.cure),
    Optional("triton", "triton", ("triton",), "pip install --force-reinstall torch", needed=True),
)


class _Refusal(MetaPathFinder, Loader):
    """Answers imports of broken packages with the reason, as an error that Megatron expects."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self.reasons else None

    def exec_module(self, module: ModuleType) -> None:
        raise ModuleNotFoundError(self.reasons[module.__name__])


_refusal = _Refusal()


def block_broken_packages() -> None:
    """Try each import once; from then on those that failed raise ModuleNotFoundError."""
    if _refusal not in sys.meta_path:
        sys.meta_path.insert(0, _refusal)
    import torch  # noqa: F401  (as in Megatron: TransformerEngine's libraries need those of torch)

    for optional in OPTIONAL:
        if any(f"{optional.blocked}.".startswith(f"{name}.") for name in _refusal.reasons):
            continue
        error = _failure(optional.module)
        if error is None:
            continue
        name = next((n for n in optional.packages if version_of(n)), optional.packages[0])
        otherwise = "" if optional.needed else f", or pip uninstall {name}"
        _refusal.reasons[optional.blocked] = f"{broken(name, error)}: {optional.cure}{otherwise}"
        # Submodules that were imported before the failure would hide it.
        for module in [m for m in sys.modules if f"{m}.".startswith(f"{optional.blocked}.")]:
            del sys.modules[module]


def describe() -> Iterator[str]:
    """Yield one line for each broken package, with its version and the fix."""
    yield from _refusal.reasons.values()


def _failure(module: str) -> Exception | None:
    """Return the error of an import; None if it succeeds, or if nothing is installed."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        absent = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        return None if absent else error
    except Exception as error:
        return error
    return None
