"""Every file can be read at a sitting, and the package has no import cycle."""

import ast
import graphlib
import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import schedule
from tests.distributed import test_layouts, test_masks, test_moe
from tests.distributed.cases import cases
from tests.schedule import FIRST, LATER, SAMPLED, is_first, measured, tiers
from tests.test_imports import ROOMS, imports, modules

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 350


def test_no_python_file_is_long():
    rooms = ("benchmarks", "examples", "megasink", "tests", "tools")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 300
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def cycle(files: list[tuple[Path, str]]) -> list[str]:
    """Modules that import each other, in functions too; the first once more at the end."""
    known = {module for _, module in files} - {"megasink"}  # which imports names when they are used
    graph = {}
    for path, module in files:
        tree = ast.parse(path.read_text())
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
    "line",
    [
        "import megasink.b",
        "from megasink import b",
        "if True:\n    from .b import f",
        "class C:\n    from .b import f",
        "def f():\n    from .b import f",
    ],
)
def test_a_planted_cycle_is_found(tmp_path, line):
    for name, text in (("a", line), ("b", "from megasink.a import f")):
        (tmp_path / f"{name}.py").write_text(text + "\n")
    assert cycle([(tmp_path / f"{name}.py", f"megasink.{name}") for name in "ab"])


def test_the_schedule_names_tests_that_exist():
    for name in {*FIRST, *SAMPLED, *LATER}:
        file, _, test = name.partition("::")
        text = (ROOT / file).read_text()
        assert not test or re.search(rf"^def {test.partition('[')[0]}", text, re.M), name


def test_every_room_has_tests_in_the_first_tier():
    """In a folder of its name, or in files that import it."""
    tested = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if is_first(str(path.relative_to(ROOT))):
            tested.add(path.relative_to(ROOT / "tests").parts[0])
            names = [name for _, name in imports(ast.parse(path.read_text()), "tests.a")]
            tested |= {name.split(".")[1] for name in names if name.startswith("megasink.")}
    assert {*ROOMS} - {"__init__", "__main__"} <= tested


def test_of_a_sampled_test_every_so_many_cases_are_run_and_the_rest_later():
    name, every = next((n, e) for n, e in SAMPLED.items() if not is_first(n))

    def item(nodeid, *marks):
        return SimpleNamespace(nodeid=nodeid, get_closest_marker={m: m for m in marks}.get)

    cases = [item(f"{name}[{i}]") for i in range(2 * every + 1)]
    others = [item("tests/a.py::test_b[0]"), item("tests/a.py::test_b[1]", "later")]
    found = [tier for _, tier in tiers([*cases, *others, item(LATER[0]), item(FIRST[0])])]
    wanted = ["later" if i % every else "rest" for i in range(2 * every + 1)]
    assert found == [*wanted, "first", "later", "later", "first"]


def test_every_kind_of_layout_is_among_the_sampled_cases():
    sampled, every = set(), set()
    for file in (test_layouts, test_masks, test_moe):
        path = str(Path(file.__file__).relative_to(ROOT))
        kinds = [where.partition("+")[0] for _, where in cases(file.MODELS)]
        sampled |= {*kinds[:: SAMPLED[f"{path}::test_layout_changes_nothing"]]}
        every |= {*kinds}
    assert every - sampled == {"single"}  # a single process that recomputes


def test_durations_are_read_from_what_pytest_prints():
    log = ["= slowest durations =", "1.50s setup    tests/a.py::test_b[a b]", "0.26s call  "]
    log += ["0.26s call     tests/a.py::test_b", "9.00s call     tests/c.py::test_d"]
    log += ["0.90s call     tests/e.py::test_f", "= 2 passed, 1 skipped in 11.66s ="]
    assert measured(log) == {"tests/a.py": 1.8, "tests/c.py": 9.0}


@pytest.mark.parametrize(
    ("argv", "log", "named"),
    [
        (["--help"], "1.50s call     tests/a.py::test_b\n", "--help"),
        ([], "", "no durations"),
        ([], None, "a terminal"),
    ],
)
def test_durations_stay_where_there_is_no_log(tmp_path, monkeypatch, argv, log, named):
    file = tmp_path / "durations.json"
    file.write_text("{}")
    monkeypatch.setattr(schedule, "RECORD", file)
    stdin = io.StringIO(log or "")
    stdin.isatty = lambda: log is None
    with pytest.raises(SystemExit, match=named):
        schedule.record(argv, stdin)
    assert file.read_text() == "{}"
    schedule.record([], io.StringIO("1.50s call     tests/a.py::test_b\n"))
    assert "tests/a.py" in file.read_text()
