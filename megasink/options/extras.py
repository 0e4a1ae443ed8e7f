"""The two ways to install: `megasink`, and `megasink[train]` with Megatron-Core."""

import importlib.util
from pathlib import Path

from megasink.errors import UserError

TRAIN = "pip install 'megasink[train]'"


def have_megatron() -> bool:
    """Return whether Megatron-Core is installed (other packages may be named megatron)."""
    places = _places("megatron")
    return places is not None and any((Path(place) / "core").is_dir() for place in places)


def require_train(what: str) -> None:
    """Raise UserError, with the command that installs Megatron-Core, if it is not installed."""
    if not have_megatron():
        raise UserError(f"{what} needs megasink[train]: {TRAIN}")


def require(package: str, what: str) -> None:
    """Raise UserError, with the install command, for a missing package of megasink[train]."""
    if _places(package) is None:
        raise UserError(f"{what} needs {package}, which is part of megasink[train]: {TRAIN}")


def _places(package: str) -> list[str] | None:
    """Return the folders of a package; None if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # raised by finders that hide packages
        return None
    return None if spec is None else list(spec.submodule_search_locations or ())
