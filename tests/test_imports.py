"""Who may import what: the layers of the package, by the import statements in its files."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "megasink"

# The rooms that may import megatron; a name with a dot is one module.
MEGATRON = (
    "megasink.platform",
    "megasink.upstream",
    "megasink.layers",
    "megasink.lora",
    "megasink.inference",
    "megasink.specs",
    "megasink.parser",
    "megasink.checkpoint",
    "megasink.train",
    "megasink.data",
    "megasink.convert",
    "megasink.probe",
    "megasink.balance.reduce",
    "megasink.plan",
)
# Nothing imports the trainer but itself, grids and plans of runs, and the commands, which are the
# entry points.
TRAIN = ("megasink.train", "megasink.grid", "megasink.plan", "megasink.commands")
# What a room may import beside the standard library and itself.
ALLOWED = {
    "megasink.attention": {"torch", "triton", "megasink.errors", "megasink.definitions"},
    "megasink.variants": {
        "megasink.attention",
        "megasink.command_line",
        "megasink.errors",
        "torch",
    },
    "megasink.diagnostics": {
        *("torch", "numpy", "scipy", "sklearn", "threadpoolctl"),
        "megasink.definitions",
    },
    "megasink.convert.modeling": {"torch", "transformers"},  # copied beside the weights
    "megasink.transformers": {
        *("torch", "transformers", "numpy"),
        *("megasink.attention", "megasink.errors", "megasink.config", "megasink.atomic"),
        *("megasink.balance", "megasink.probe.blocks", "megasink.report"),
    },
    "megasink.hollow": {"torch", "megasink.atomic", "megasink.errors"},
}


def inside(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def imports(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, imported module) of every import in a module, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base]).rstrip(".")
            for alias in node.names:
                # "from megasink import train" imports a module, "from x import f" may not.
                yield node.lineno, f"{base}.{alias.name}"


def violations(path: Path, module: str) -> list[str]:
    """What a file imports that its room may not."""
    found = []
    tree = ast.parse(path.read_text())
    for line, name in imports(tree, module, path.name == "__init__.py"):
        where = f"{module}:{line} imports {name}"
        if inside(name, "megatron") and not any(inside(module, room) for room in MEGATRON):
            found.append(f"{where}: only {', '.join(MEGATRON)} may import megatron")
        if inside(name, "megasink.train") and not any(inside(module, room) for room in TRAIN):
            found.append(f"{where}: only {', '.join(TRAIN)}, tools and examples may import train")
        for room, allowed in ALLOWED.items():
            standard = name.split(".")[0] in sys.stdlib_module_names
            known = standard or any(inside(name, other) for other in {room, *allowed})
            if inside(module, room) and not known:
                found.append(f"{where}: {room} may import {', '.join(sorted(allowed))} alone")
    return found


def modules() -> list[tuple[Path, str]]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [
        (f, ".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"))
        for f in files
    ]


def test_the_package_keeps_to_its_layers():
    assert len(modules()) > 30
    assert [v for path, module in modules() for v in violations(path, module)] == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("megasink.balance.loss", "import megatron.core"),
        ("megasink.balance.loss", "from megatron import core"),
        ("megasink.errors", "def f():\n    from megatron.core import mpu"),
        ("megasink.attention.flash", "import numpy"),
        ("megasink.attention.flash", "from megasink.config import Scope"),
        ("megasink.attention.flash", "from ..config import Scope"),
        ("megasink.diagnostics.scores", "from megasink.attention import attention"),
        ("megasink.layers.norm", "from megasink.train import run_dir"),
        ("megasink.layers.norm", "from megasink import train"),
        ("megasink.layers.norm", "from .. import train"),
        ("megasink.report.curves", "import megasink.train.observer"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, module, line):
    path = tmp_path / "planted.py"
    path.write_text(line + "\n")
    (found,) = violations(path, module)
    assert found.startswith(module)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("megasink.layers.norm", "from megatron.core import mpu"),
        ("megasink.balance.reduce", "from megatron.core import mpu"),
        ("megasink.commands.train", "from megasink.train.launch import launch"),
        ("megasink.attention.flash", "import math, torch\nfrom megasink.errors import UserError"),
        ("megasink.attention.flash", "from . import reference\nfrom .backends import base"),
        ("megasink.errors", "import megatronics"),
    ],
)
def test_what_is_allowed_is_not_reported(tmp_path, module, line):
    path = tmp_path / "good.py"
    path.write_text(line + "\n")
    assert violations(path, module) == []
