"""The only mechanism by which megasink replaces attributes of upstream packages.

Before a replacement, the upstream lines that a patch depends on are looked up in the installed
source (`Quote`). If one is missing, the run is refused in one line with the package, its version
and the expected code: replacing changed code would fail later, or silently do something else.
Files are read and parsed, never imported. Quotes are compared as syntax trees, so comments,
docstrings, annotations, line breaks and quotation marks may change, and lines may move within their
function.
"""

import ast
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from megasink.errors import UserError
from megasink.tried import numbers_of
from megasink.upstream.versions import version_of

_DISTRIBUTIONS = {"megatron": "megatron-core", "transformer_engine": "transformer-engine"}


class MovedError(Exception):
    """Raised if upstream's source lacks a quoted line; the message says which, and where."""


@dataclass(frozen=True)
class Quote:
    """A line of upstream's source."""

    where: str  # ``package.module``, or ``package.module:Class.method`` for a line inside one
    # A statement or an expression; ``f(...)`` matches a call with any arguments. Or a signature,
    # ``def f(a, b)``, of parameter names; a final ``*_`` allows more parameters.
    code: str

    @property
    def package(self) -> str:
        """The PyPI name of the package."""
        top = self.where.partition(".")[0]
        return _DISTRIBUTIONS.get(top, top)

    @property
    def distribution(self) -> str:
        """The PyPI name and installed version of the package."""
        return f"{self.package} {version_of(self.package)}"

    def is_installed(self) -> bool:
        """Return whether the package is installed and not blocked (cpu/broken_packages.py)."""
        spec = importlib.util.find_spec(self.where.partition(".")[0])
        return spec is not None and spec.submodule_search_locations is not None

    def find(self) -> str:
        """Return ``file:line`` in the installed source."""
        module, _, scope = self.where.partition(":")
        is_header = self.code.startswith("def ")
        quoted: ast.AST = ast.parse(f"{self.code}: ..." if is_header else self.code).body[0]
        if isinstance(quoted, ast.FunctionDef):
            scope = f"{scope}.{quoted.name}".lstrip(".")
        name, text = _read(module)
        try:
            first, tree = _block(text, scope)
        except LookupError:
            raise MovedError(f"{name} no longer has {scope}") from None
        if isinstance(quoted, ast.FunctionDef):
            (there,) = tree.body
            assert isinstance(there, ast.FunctionDef | ast.AsyncFunctionDef)
            wanted, names = _parameters(quoted), _parameters(there)
            open_end = wanted[-1:] == ["*_"]
            if names[: len(wanted) - 1] != wanted[:-1] if open_end else names != wanted:
                raise MovedError(f"{name} has {scope}({', '.join(names)}), not `{self.code}`")
            return f"{name}:{first + there.lineno}"
        if isinstance(quoted, ast.Expr):
            quoted = quoted.value
        for node in ast.walk(tree):
            if isinstance(node, ast.expr | ast.stmt) and _same(quoted, node):
                return f"{name}:{first + node.lineno}"
        raise MovedError(f"{name} no longer contains `{self.code}`" + f" in {scope}" * bool(scope))


@cache
def _read(module: str) -> tuple[str, str]:
    """Return (path with the package name, text) of a module's file."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for folder in (spec and spec.submodule_search_locations) or ():
        stem = Path(folder, *rest)
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return str(path.relative_to(Path(folder).parent)), path.read_text()
    raise MovedError(f"{module.replace('.', '/')}.py no longer exists")


@cache
def _block(text: str, scope: str) -> tuple[int, ast.Module]:
    """Return (number of lines before it, tree) of a function, class or module."""
    # Only the block's own lines are parsed: Megatron's files have thousands.
    if not scope:
        return 0, ast.parse(text)
    lines, start = text.splitlines(keepends=True), -1
    for name in scope.split("."):
        indent = r"\s*" if start < 0 else r"\s+"
        head = re.compile(rf"{indent}(async )?(def|class) {name}\b")
        for number in range(start + 1, len(lines)):
            if head.match(lines[number]):
                start = number
                break
            # A method of the next class does not match.
            if indent == r"\s+" and lines[number].startswith("class "):
                raise LookupError(name)
        else:
            raise LookupError(name)
    block = inspect.getblock(lines[start:])
    return start, ast.parse(textwrap.dedent("".join(block)))


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [a.arg for a in given.kwonlyargs]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def _same(quoted: object, there: object) -> bool:
    """Whether two syntax trees match; ``...`` as a call's arguments matches any."""
    if isinstance(quoted, ast.expr_context):
        return True
    if type(quoted) is not type(there):
        return False
    if isinstance(quoted, list) and isinstance(there, list):
        return len(quoted) == len(there) and all(map(_same, quoted, there))
    if not isinstance(quoted, ast.AST):
        return quoted == there
    fields: tuple[str, ...] = quoted._fields
    if isinstance(quoted, ast.Call) and [getattr(a, "value", None) for a in quoted.args] == [...]:
        fields = ("func",)
    return all(_same(getattr(quoted, name), getattr(there, name)) for name in fields)


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
    fixed_in: str | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the installed release has the defect that the patch fixes."""
        if self.fixed_in is None:
            return True
        installed = version_of(self.quotes[0].package)
        return installed is None or numbers_of(installed) < numbers_of(self.fixed_in)

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
    """Return a constructor of a room's patches, whose owner is ``module`` or ``module:Class``."""
    # A quote is ``where: code``, ``:scope: code`` in the owner's module, or the owner's ``def
    # f(a)``.

    def patch(
        name: str,
        owner: str,
        attributes: str,
        reason: str,
        *quotes: str,
        test: str = test,
        fixed_in: str | None = None,
    ) -> Patch:
        module = owner.partition(":")[0]
        lines = []
        for quote in quotes:
            where, code = (owner, quote) if quote[:4] == "def " else quote.split(": ", 1)
            lines.append(Quote(where if where[:1].strip(":") else module + where, code))
        dotted = owner.replace(":", ".")
        return Patch(name, room, dotted, attributes, reason, tuple(lines), test, fixed_in)

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
