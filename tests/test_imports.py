"""Who may import what: the layers of the package, by the import statements in its files."""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from megasink.cli import COMMANDS, OF_TRAIN

PACKAGE = Path(__file__).resolve().parents[1] / "megasink"

# The rooms that may import megatron; a name with a dot is one module.
MEGATRON = (
    "megasink.platform",
    "megasink.upstream",
    "megasink.layers",
    "megasink.lora",
    "megasink.inference",
    "megasink.megatron",
    "megasink.parser",
    "megasink.checkpoint",
    "megasink.train",
    "megasink.data",
    "megasink.convert",
    "megasink.probe",
    "megasink.balance.reduce",
    "megasink.plan",
    "megasink.doctor.training_step",
)
# Nothing imports the trainer but itself, plans of runs, and the commands, which are the
# entry points.
TRAIN = ("megasink.train", "megasink.plan", "megasink.commands")
# What a room may import beside the standard library and itself.
ALLOWED = {
    "megasink.attention": {"torch", "triton", "megasink.errors", "megasink.definitions"},
    "megasink.variants": {
        "megasink.attention",
        "megasink.errors",
        "torch",
    },
    "megasink.diagnostics": {
        *("torch", "numpy", "scipy", "sklearn", "threadpoolctl"),
        *("megasink.balance", "megasink.definitions"),
    },
    "megasink.convert.modeling": {"torch", "transformers"},  # copied beside the weights
    "megasink.transformers": {
        *("torch", "transformers", "numpy"),
        *("megasink.attention", "megasink.errors", "megasink.config", "megasink.atomic"),
        *("megasink.balance", "megasink.probe.blocks", "megasink.report"),
    },
    "megasink.hollow": {"torch", "megasink.atomic", "megasink.errors"},
}

# What works without the extra "train", on its own and by what it imports at once; what it imports
# inside of functions is for runs, and tests/light runs it without Megatron.
LIGHT = (
    *("megasink.api", "megasink.attention", "megasink.diagnostics", "megasink.intervene"),
    *("megasink.report", "megasink.transformers", "megasink.variants", "megasink.cli"),
    *("megasink.convert.to_hf", "megasink.convert.hf_config", "megasink.convert.targets"),
    *("megasink.convert.safetensors_reader", "megasink.checkpoint.find", "megasink.process"),
    *("megasink.probe.analysis", "megasink.probe.sweep", "megasink.probe.load"),
)
OF_TRAIN_ALONE = {"megatron", "psutil", "sentencepiece", "tensorboard", "pyarrow"}


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


def at_once(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """As `imports`, without those inside of functions and for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(ast.Module([node], []), module, is_package)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_once(ast.Module(node.orelse, []), module, is_package)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from at_once(node, module, is_package)


def reached(roots: Iterable[str], files: Mapping[str, Path]) -> dict[str, list[str]]:
    """{module: the chain of imports that leads to it} of all that is imported with the roots."""
    found = {root: [root] for root in files if any(inside(root, room) for room in roots)}
    waiting = list(found)
    while waiting:
        module = waiting.pop(0)
        path = files.get(module)
        if path is None:
            continue
        tree = ast.parse(path.read_text())
        for _, name in at_once(tree, module, path.name == "__init__.py"):
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                each = ".".join(parts[:end])
                if each not in found and (each in files or parts[0] != "megasink"):
                    found[each] = [*found[module], each]
                    waiting.append(each)
    return found


def heavy(roots: Iterable[str], files: Mapping[str, Path]) -> list[str]:
    """Chains of imports from the roots to what only megasink[train] brings."""
    chains = reached(roots, files).items()
    return [" -> ".join(chain) for name, chain in chains if name in OF_TRAIN_ALONE]


def test_the_light_rooms_import_nothing_of_the_train_weight():
    files = {module: path for path, module in modules()}
    commands = {f"megasink.commands.{name.replace('-', '_')}" for name in {*COMMANDS} - {*OF_TRAIN}}
    assert commands <= files.keys()
    assert {*LIGHT} <= files.keys()
    assert heavy((*LIGHT, *commands), files) == []
    found = reached(LIGHT, files)
    assert {"torch", "transformers", "megasink.probe.base"} <= found.keys()


def test_a_planted_chain_to_megatron_is_found(tmp_path):
    texts = {
        "megasink.a": "from megasink import b\n",
        "megasink.b": "if TYPE_CHECKING:\n    import psutil\ntry:\n    from megatron import core\n"
        "except ImportError:\n    pass\n\ndef f():\n    import pyarrow\n",
    }
    files = {name: tmp_path / f"{name}.py" for name in texts}
    for name, text in texts.items():
        files[name].write_text(text)
    assert heavy(["megasink.a"], files) == ["megasink.a -> megasink.b -> megatron"]


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
