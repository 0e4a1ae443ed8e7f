"""The one way in which megasink replaces an attribute of an upstream package.

Before anything is replaced, the lines of upstream's source that a patch rests on are looked up in
the installed source (`source.Quote`). Where one has gone, the run is refused in one line with the
package, its version and what was expected: a replacement for code that has changed would fail
later, or do something else without a word.
"""

import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from megasink.errors import UserError
from megasink.upstream.source import MovedError, Quote

Room = Literal["platform", "always", "training", "loading"]
_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """Attributes of an upstream module or class that megasink replaces.

    Attributes:
        name: as `megasink info` lists it.
        room: when it is in force: "platform" where Megatron runs on a CPU, "always" in every
            process that uses Megatron, "training" in a run, "loading" while one is loaded.
        owner: dotted name of the module or class; of the first, where there are several.
        attributes: what is replaced there, separated by spaces.
        reason: why, in one sentence.
        quotes: the upstream lines that make it necessary, and the headers of what it replaces.
        test: file of the test in which upstream code runs with it, or fails without it.
    """

    name: str
    room: Room
    owner: str
    attributes: str
    reason: str
    quotes: tuple[Quote, ...]
    test: str

    def where(self) -> list[str]:
        """``file:line`` of each quotation in the installed source, for those that are installed.

        Raises:
            UserError: a line has gone.
        """
        places = []
        for quote in self.quotes:
            try:
                places += [quote.find()] if quote.is_installed() else []
            except MovedError as error:
                raise UserError(
                    f"{quote.distribution}: {error}, which megasink's patch '{self.name}' of "
                    f"{self.owner} rests on: install the versions of constraints.txt"
                ) from error
        return places

    @property
    def is_active(self) -> bool:
        """Whether it is in force in this process."""
        return any(replacement.patch is self for replacement in _active)

    def apply(self, on: Any = None, /, **new: Any) -> list["Replacement"]:
        """Replace attributes from now on.

        Args:
            on: the object that has them, if it is not `owner`.
            new: replacement of each attribute.

        Raises:
            UserError: upstream's source has changed.
        """
        self.where()
        owner = pkgutil.resolve_name(self.owner) if on is None else on
        made = [Replacement.make(self, owner, name, value) for name, value in new.items()]
        _active.extend(made)
        return made

    @contextmanager
    def replacing(self, on: Any = None, /, **new: Any) -> Iterator[None]:
        """As `apply`, until the end of the block."""
        made = self.apply(on, **new)
        try:
            yield
        finally:
            undo(made)


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
        """Replace it."""
        if not hasattr(owner, name):
            raise UserError(
                f"{patch.quotes[0].distribution}: {getattr(owner, '__name__', owner)} no longer "
                f"has {name}, which megasink's patch '{patch.name}' replaces: install the versions "
                "of constraints.txt"
            )
        # A class attribute reached through inheritance is restored by deleting the replacement.
        inherited = isinstance(owner, type) and name not in vars(owner)
        original = vars(owner)[name] if isinstance(owner, type) and not inherited else None
        if not isinstance(owner, type):
            original = getattr(owner, name)
        made = cls(patch, owner, name, new, _MISSING if inherited else original)
        made.redo()
        return made

    @property
    def target(self) -> str:
        """As Python writes it."""
        owner = getattr(self.owner, "__name__", None) or getattr(self.owner, "name", self.owner)
        return f"{owner}.{self.name}"

    def undo(self) -> None:
        """Put the original back."""
        if self.original is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)

    def redo(self) -> None:
        """Put the replacement back."""
        setattr(self.owner, self.name, self.replacement)


_active: list[Replacement] = []


def active(room: Room | None = None) -> list[Replacement]:
    """What is replaced in this process, in order; of one room alone where one is given."""
    return [r for r in _active if room in (None, r.patch.room)]


def undo(replacements: list[Replacement]) -> None:
    """Put the originals back, the latest first."""
    for replacement in reversed(replacements):
        replacement.undo()
        _active.remove(replacement)


@contextmanager
def suspended(room: Room = "platform") -> Iterator[None]:
    """Every original is back inside the block: what a step costs without the replacements."""
    replacements = active(room)
    with ExitStack() as stack:
        for replacement in replacements:
            stack.callback(replacement.redo)
        for replacement in reversed(replacements):
            replacement.undo()
        yield
