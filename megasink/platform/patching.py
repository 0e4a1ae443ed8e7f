"""The one way the platform replaces an upstream attribute: named, reasoned and reversible."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One replaced attribute.

    Attributes:
        owner: the module or class whose attribute was replaced.
        name: the attribute.
        upstream: file and line (megatron-core 0.19.2 unless it says otherwise) that needs it.
        reason: why, in one sentence.
    """

    owner: Any
    name: str
    upstream: str
    reason: str
    original: Any = field(repr=False, default=_MISSING)
    replacement: Any = field(repr=False, default=None)

    @property
    def target(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}"

    def undo(self) -> None:
        """Put the original back."""
        if self.original is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


_installed: list[Patch] = []
_undo_others: list[Callable[[], None]] = []


def replace(owner: Any, name: str, new: Any, *, upstream: str, reason: str) -> Any:
    """Replace ``owner.name`` by ``new`` and remember how to undo it.

    Returns:
        the original attribute.

    Raises:
        AttributeError: there is no such attribute, so the patch is dead.
    """
    original = getattr(owner, name)
    # A class attribute reached through inheritance is restored by deleting the replacement.
    own = vars(owner).get(name, _MISSING)
    setattr(owner, name, new)
    _installed.append(Patch(owner, name, upstream, reason, own, new))
    return original


def undo_by(callback: Callable[[], None]) -> None:
    """Remember how to undo a change that is no replaced attribute."""
    _undo_others.append(callback)


def patches() -> list[Patch]:
    """The replacements in force, in the order in which they were made."""
    return list(_installed)


@contextmanager
def suspended() -> Iterator[None]:
    """Every original is back inside the block: what a step costs without the replacements."""
    for patch in reversed(_installed):
        patch.undo()
    try:
        yield
    finally:
        for patch in _installed:
            setattr(patch.owner, patch.name, patch.replacement)


def deactivate_all() -> None:
    """Put every original back, newest first."""
    while _installed:
        _installed.pop().undo()
    while _undo_others:
        _undo_others.pop()()
