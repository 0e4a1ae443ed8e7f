"""The only mechanism by which megasink replaces attributes of upstream packages.

Before a replacement, the upstream lines that a patch depends on are looked up in the installed
source (`source.Quote`). If one is missing, the run is refused in one line with the package, its
version and the expected code: replacing changed code would fail later, or silently do something
else.
"""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from megasink.errors import UserError
from megasink.tried import numbers_of
from megasink.upstream.source import MovedError, Quote
from megasink.upstream.versions import version_of

Room = Literal["platform", "always", "training", "loading"]
_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """Attributes of an upstream module or class that megasink replaces."""

    name: str  # the name in `megasink doctor`
    # When the patch is active: "platform" if Megatron runs on a CPU, "always" in every process that
    # uses Megatron, "training" in a run, "loading" while a run is loaded.
    room: Room
    owner: str  # dotted name of the module or class; the first, if there are several
    attributes: str  # the replaced attributes, separated by spaces
    reason: str  # why the patch is needed, in one sentence
    # The upstream lines that make it necessary, and the signatures that it replaces.
    quotes: tuple[Quote, ...]
    test: str  # the test file in which upstream code runs with the patch, or fails without it
    # The first release of the quoted package that needs no patch, such as "0.20": from then on it
    # is not applied.
    mended: str | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the installed release has what the patch is for."""
        if self.mended is None:
            return True
        installed = version_of(self.quotes[0].package)
        return installed is None or numbers_of(installed) < numbers_of(self.mended)

    def originals(self) -> dict[str, Any]:
        """Return the current value of each attribute, by name."""
        owner = pkgutil.resolve_name(self.owner)
        return {name: getattr(owner, name) for name in self.attributes.split()}

    def where(self) -> list[str]:
        """Return ``file:line`` for each quote whose package is installed; none if not needed."""
        places: list[str] = []
        if not self.is_needed:
            return places
        for quote in self.quotes:
            try:
                places += [quote.find()] if quote.is_installed() else []
            except MovedError as error:
                raise UserError(
                    f"{quote.distribution}: {error}, which megasink's patch '{self.name}' of "
                    f"{self.owner} depends on: install the versions in constraints.txt"
                ) from error
        return places

    @property
    def is_active(self) -> bool:
        """Whether the patch is active in this process."""
        return any(replacement.patch is self for replacement in _active)

    def apply(self, on: Any = None, /, **new: Any) -> list["Replacement"]:
        """Replace attributes of `owner`, or of another object, from now on, if it is needed."""
        if not self.is_needed:
            return []
        self.where()
        owner = pkgutil.resolve_name(self.owner) if on is None else on
        made = [Replacement.make(self, owner, name, value) for name, value in new.items()]
        _active.extend(made)
        return made

    @contextmanager
    def replacing(self, on: Any = None, /, **new: Any) -> Iterator[None]:
        """Apply the patch until the end of the block."""
        made = self.apply(on, **new)
        try:
            yield
        finally:
            undo(made)


def patches(room: Room, test: str) -> Callable[..., Patch]:
    """Return a constructor of a room's patches, which writes a quote as ``where: code``."""

    def patch(
        name: str,
        owner: str,
        attributes: str,
        reason: str,
        *quotes: str,
        test: str = test,
        mended: str | None = None,
    ) -> Patch:
        lines = tuple(Quote(*quote.split(": ", 1)) for quote in quotes)
        return Patch(name, room, owner, attributes, reason, lines, test, mended)

    return patch


@dataclass(frozen=True)
class Replacement:
    """One replaced attribute of one object."""

    patch: Patch
    owner: Any
    name: str
    replacement: Any = field(repr=False)
    original: Any = field(repr=False)

    @classmethod
    def make(cls, patch: Patch, owner: Any, name: str, new: Any) -> "Replacement":
        """Replace an attribute."""
        if not hasattr(owner, name):
            raise UserError(
                f"{patch.quotes[0].distribution}: {getattr(owner, '__name__', owner)} no longer "
                f"has {name}, which megasink's patch '{patch.name}' replaces: install the versions "
                "in constraints.txt"
            )
        is_class = isinstance(owner, type)
        # A class attribute reached through inheritance is restored by deleting the replacement.
        original = vars(owner).get(name, _MISSING) if is_class else getattr(owner, name)
        made = cls(patch, owner, name, new, original)
        made.redo()
        return made

    @property
    def target(self) -> str:
        """The dotted name of the attribute."""
        owner = getattr(self.owner, "__name__", None) or getattr(self.owner, "name", self.owner)
        return f"{owner}.{self.name}"

    def undo(self) -> None:
        """Restore the original."""
        if self.original is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)

    def redo(self) -> None:
        """Reapply the replacement."""
        setattr(self.owner, self.name, self.replacement)


_active: list[Replacement] = []


def active(room: Room | None = None) -> list[Replacement]:
    """Return this process's replacements in order, optionally of one room only."""
    return [r for r in _active if room in (None, r.patch.room)]


def undo(replacements: list[Replacement]) -> None:
    """Restore the originals, latest first."""
    for replacement in reversed(replacements):
        replacement.undo()
        _active.remove(replacement)


@contextmanager
def suspended(room: Room = "platform") -> Iterator[None]:
    """Restore every original within the block, to measure the cost of the replacements."""
    replacements = active(room)
    with ExitStack() as stack:
        for replacement in replacements:
            stack.callback(replacement.redo)
        for replacement in reversed(replacements):
            replacement.undo()
        yield
