"""Find quoted lines in upstream's source files by content, not line number.

Files are read and parsed, never imported. Quotes are compared as syntax trees, so comments,
docstrings, annotations, line breaks and quotation marks may change, and lines may move within their
function.
"""

import ast
import importlib.util
import inspect
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
        """Whether the package is installed."""
        return importlib.util.find_spec(self.where.partition(".")[0]) is not None

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
        raise MovedError(f"{name} no longer says `{self.code}`" + f" in {scope}" * bool(scope))


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
    """Return (number of lines before it, tree) of a function, class or module.

    Only the block's own lines are parsed: Megatron's files have thousands.
    """
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
