"""Every file can be read at a sitting, and the package has no import cycle."""

import ast
import graphlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.schedule import LATER, LONG, QUICK, SAMPLED, later
from tests.test_imports import imports, modules

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 350


def test_no_python_file_is_long():
    rooms = ("benchmarks", "examples", "megasink", "tests", "tools")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 300
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def at_import(tree: ast.Module) -> ast.Module:
    """The statements that run while a module is imported, but for those for type checkers."""

    class Imported(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None: ...

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None: ...

        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            node = self.generic_visit(node)
            return node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else node

    return Imported().visit(tree)


def cycle(files: list[tuple[Path, str]]) -> list[str]:
    """Modules that import each other while they are imported, the first once more at the end."""
    known = {module for _, module in files}
    graph = {}
    for path, module in files:
        tree = at_import(ast.parse(path.read_text()))
        names = [name for _, name in imports(tree, module, path.name == "__init__.py")]
        # `from a.b import c` imports the module a.b.c, or a.b if c is something in it.
        graph[module] = {n if n in known else n.rpartition(".")[0] for n in names} & known
        graph[module].discard(module)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_the_package_has_no_import_cycle():
    assert cycle(modules()) == []


@pytest.mark.parametrize(
    ("line", "circular"),
    [
        ("import megasink.b", True),
        ("from megasink import b", True),
        ("if True:\n    from .b import f", True),
        ("class C:\n    from .b import f", True),
        ("def f():\n    from .b import f", False),
        ("if TYPE_CHECKING:\n    from .b import f", False),
    ],
)
def test_a_planted_cycle_is_found(tmp_path, line, circular):
    for name, text in (("a", line), ("b", "from megasink.a import f")):
        (tmp_path / f"{name}.py").write_text(text + "\n")
    files = [(tmp_path / f"{name}.py", f"megasink.{name}") for name in "ab"]
    assert bool(cycle(files)) == circular


@pytest.mark.parametrize("name", sorted({*LONG, *QUICK, *SAMPLED, *LATER}))
def test_the_schedule_names_tests_that_exist(name):
    file, _, test = name.partition("::")
    text = (ROOT / file).read_text()
    assert re.search(rf"^def {test.partition('[')[0]}", text, re.M) if test else text


def test_of_a_sampled_test_every_so_many_cases_are_run():
    name, every = next(iter(SAMPLED.items()))
    cases = [SimpleNamespace(nodeid=f"{name}[{i}]") for i in range(2 * every + 1)]
    others = [SimpleNamespace(nodeid="tests/a.py::test_b[0]"), SimpleNamespace(nodeid=LATER[0])]
    found = [item.nodeid for item in later([*cases, *others])]
    skipped = [f"{name}[{i}]" for i in range(2 * every + 1) if i % every]
    assert found == [*skipped, LATER[0]]
