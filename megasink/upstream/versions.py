"""Installed versions, and a clear error for each unsupported one."""

import importlib.metadata
import importlib.util
import sys

from megasink.errors import UserError
from megasink.options.extras import require, require_train
from megasink.tried import TRAINER, numbers_of

# Tested versions; others may change the code that layers and patches depend on.
SUPPORTED = {"megatron-core": TRAINER, "torch": ((2, 11), None)}
REPORTED = (
    "megatron-core",
    "torch",
    "transformer-engine",
    "flash-attn",
    "flash-attn-4",
    "apex",
    "transformers",
    "tokenizers",
    "sentencepiece",
    "numpy",
)


def version_of(package: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Return the versions of Python and of every relevant installed package."""
    installed = {"python": ".".join(map(str, sys.version_info[:3]))}
    installed |= {name: v for name in REPORTED if (v := version_of(name)) is not None}
    if not have_apex():
        installed.pop("apex", None)
    return installed


def check_versions() -> None:
    """Refuse an environment that megasink's hooks do not support."""
    if sys.version_info < (3, 12):  # noqa: UP036  (run from a checkout, pip has not checked)
        raise UserError(
            f"Python {sys.version.split()[0]} is too old: megatron-core 0.19 needs 3.12"
        )
    require_train("a run")
    require("triton", "Megatron-Core")  # a torch without CUDA installs no triton
    for package, (lowest, below) in SUPPORTED.items():
        installed = version_of(package)
        wanted = f">={'.'.join(map(str, lowest))}"
        wanted += f",<{'.'.join(map(str, below))}" if below else ""
        if installed is None:
            raise UserError(f"{package} is not installed: pip install '{package}{wanted}'")
        if numbers_of(installed) < lowest or (below and numbers_of(installed) >= below):
            raise UserError(
                f"{package} {installed} is not supported: pip install '{package}{wanted}'"
            )


def have_transformer_engine() -> bool:
    """Return whether TransformerEngine can be imported (its modules also need CUDA)."""
    spec = importlib.util.find_spec("transformer_engine")
    return spec is not None and spec.origin is not None  # a blocked one (cpu/) has no file


def have_apex() -> bool:
    """Return whether NVIDIA's apex is installed: the PyPI package of that name is unrelated."""
    return all(importlib.util.find_spec(name) is not None for name in ("apex", "amp_C"))
