"""docs/verified.md says what tests there are, and what they run on."""

import ast
import json
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests import versions
from tests.test_packaging import pins, project, requirements
from tests.verified import GPU_REPORTS, PAGE, ROOT, ROWS, page, path

NAMED = {
    (kind, name) for row in ROWS for kind in row._fields[1:] for name in getattr(row, kind).split()
}


def starts_ranks(file: Path) -> bool:
    """Whether a test file asks for the pool of workers, or starts ranks itself."""
    source = file.read_text()
    tests = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    asked = {argument.arg for test in tests for argument in test.args.args}
    started = ("--ranks", "--nproc-per-node", "pretrain_gpt_sink.sh", "tests.training.hosts")
    return bool(asked & {"pool", "four"}) or any(word in source for word in started)


def test_the_page_is_that_of_the_record():
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "python -m tests.verified writes it"


@pytest.mark.parametrize(("kind", "name"), sorted(NAMED))
def test_a_file_runs_where_the_page_says(kind, name):
    file = path(name)
    assert "def test_" in file.read_text()
    on_gpu = any(mark in file.read_text() for mark in ("pytest.mark.gpu", "pytestmark = MARKS"))
    hollow = file.parent.name == "hollow"
    assert (kind == "gpu") == on_gpu == (file.parent.name == "gpu")
    assert (kind == "hollow") == hollow
    if kind == "gloo":
        assert starts_ranks(file)


def test_every_test_of_ranks_and_devices_stands_behind_a_feature():
    named = {path(name) for _, name in NAMED}
    rooms = ("distributed", "hollow", "gpu")
    files = {file for room in rooms for file in (ROOT / "tests" / room).glob("test_*.py")}
    harness = {path("distributed/pool"), path("plan/hollow/room")}
    assert files - named - harness == set()


def test_nothing_claims_a_gpu_before_there_is_a_report():
    said = "has not been run on a GPU yet" in (ROOT / "README.md").read_text()
    never = "Nothing has run on a GPU yet" in PAGE.read_text()
    assert said == never == (not GPU_REPORTS)


def test_the_oldest_versions_that_were_tried_are_the_oldest_that_pip_takes():
    """And the newest that were tried are at least those that every test runs with."""
    results = json.loads(versions.RESULTS.read_text())
    assert results.keys() == versions.ROWS.keys()
    assert all(result["passed"] > 100 and not result["failed"] for result in results.values())
    allowed = requirements() + requirements("train")
    lowest = {
        each.name: specifier.version
        for each in map(Requirement, allowed)
        for specifier in each.specifier
        if specifier.operator == ">="
    }
    python = SpecifierSet(project()["project"]["requires-python"])
    tried = [results[row]["versions"]["python"] for row in ("oldest", "newest")]
    minors = [f"3.{minor}" for minor in range(100) if python.contains(f"3.{minor}")]
    assert [each.rpartition(".")[0] for each in tried] == [minors[0], minors[-1]]
    for name, version in versions.pinned("oldest").items():
        assert Version(lowest[name]) == Version(version), name
        assert results["oldest"]["versions"][name] == version
    newest = {name: Version(v) for name, v in results["newest"]["versions"].items()}
    here = pins("constraints.txt")
    assert all(newest[name] >= here[name] for name in versions.TOLD)
