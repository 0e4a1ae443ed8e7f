"""What `import megasink` promises: names, docstrings, types, and that it costs nothing."""

import inspect
import subprocess
import sys

import pytest

import megasink
from megasink import NAMES
from tests.documented import PAGES


def test_the_lists_of_names_are_one():
    assert megasink.__all__ == sorted(NAMES) == sorted(dir(megasink))
    with pytest.raises(AttributeError, match="no attribute 'analyse'"):
        _ = megasink.analyse


def test_importing_it_imports_nothing_else():
    told = "import sys, megasink; print(sorted({'torch', 'numpy', 'megatron'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def _members(public):
    """What a user calls: a function, or a class with its public methods."""
    if not inspect.isclass(public):
        return [public]
    own = [member for name, member in vars(public).items() if not name.startswith("_")]
    methods = [m.fget if isinstance(m, property) else m for m in own]
    return [public, *(m for m in methods if inspect.isfunction(m))]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_documented_and_typed(name):
    for member in _members(getattr(megasink, name)):
        assert inspect.getdoc(member), member
        if inspect.isclass(member):
            continue
        signature = inspect.signature(member)
        untyped = [
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.annotation is parameter.empty and parameter.name != "self"
        ]
        assert untyped == []
        assert signature.return_annotation is not signature.empty, member


def test_the_page_names_all_of_it():
    (page,) = [page for page in PAGES if page.name == "python.md"]
    assert [name for name in NAMES if f"`{name}" not in page.read_text()] == []
