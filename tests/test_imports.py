"""Who may import what: the layers of the package, by the import statements in its files."""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from megasink.cli import COMMANDS, OF_TRAIN

PACKAGE = Path(__file__).resolve().parents[1] / "megasink"

# "ground" in the table is all of these. config names the records of attention, which takes errors
# alone.
GROUND = ("errors", "tried", "config", "plugins", "files", "console", "options")
# {room, or file beside the rooms: (what it may import, the packages)}: imports inside of functions
# count as well. CONTRIBUTING.md says what each room is for.
ROOMS = {
    "errors": ("console", ""),
    "tried": ("", ""),
    "config": ("attention", ""),
    "plugins": ("errors", ""),
    "files": ("errors", "numpy pydantic pydantic_core"),
    "console": ("errors files", "rich"),
    "options": ("errors config", ""),
    "attention": ("errors", "torch triton"),
    "balance": ("attention errors", "torch numpy"),
    "upstream": ("attention ground", "torch megatron numpy"),
    "cpu": ("upstream ground", "torch megatron psutil"),
    "megatron": ("attention balance cpu upstream ground", "torch megatron"),
    "data": ("ground", "numpy tokenizers sentencepiece pyarrow transformers"),
    "checkpoints": ("attention megatron cpu upstream data ground", "torch megatron pydantic yaml"),
    "figures": ("megatron checkpoints ground", "numpy matplotlib"),
    "transformers": (
        "attention balance data figures ground",
        "torch transformers safetensors numpy",
    ),
    "training": (
        "attention balance megatron cpu upstream data checkpoints figures ground",
        "torch numpy rich psutil tensorboard megatron",
    ),
    "convert": (
        "checkpoints attention data transformers megatron training ground",
        "torch transformers safetensors packaging psutil megatron pydantic",
    ),
    "analysis": (
        "attention balance megatron cpu transformers checkpoints data convert figures ground",
        "torch numpy scipy sklearn threadpoolctl matplotlib PIL jinja2 markupsafe rich transformers"
        " lm_eval datasets huggingface_hub megatron",
    ),
    "finetune": (
        "balance data transformers figures analysis ground",
        "torch transformers numpy trl peft datasets safetensors pyarrow huggingface_hub",
    ),
    "plan": (
        "attention megatron cpu upstream training ground",
        "torch triton rich megatron yaml",
    ),
    "cli": (
        "attention balance megatron cpu upstream data checkpoints figures transformers finetune"
        " training convert analysis plan ground",
        "torch numpy rich matplotlib tokenizers transformers megatron packaging huggingface_hub",
    ),
    "__init__": ("analysis transformers errors", ""),
    "__main__": ("console cli", ""),
}
# Parts that take less than their room.
PARTS = {
    "megasink.analysis.metrics": {
        *("torch", "numpy", "scipy", "sklearn", "threadpoolctl"),
        *("megasink.balance", "megasink.attention.constants"),
    },
    "megasink.transformers.modeling": {"torch", "transformers"},  # copied beside the weights
    "megasink.plan.hollow": {"torch", "megasink.files.atomic", "megasink.errors"},
}

# What works without the extra "train", on its own and by what it imports at once; what it imports
# inside of functions is for runs, and tests/light runs it without Megatron.
LIGHT = (
    *(
        "megasink.analysis.api",
        "megasink.attention",
        "megasink.analysis.metrics",
        "megasink.analysis.interventions",
    ),
    *(
        "megasink.analysis.pages",
        "megasink.transformers",
        "megasink.attention.variants",
        "megasink.__main__",
    ),
    *("megasink.convert.to_hf", "megasink.convert.hf_config", "megasink.convert.targets"),
    *(
        "megasink.convert.safetensors_files",
        "megasink.checkpoints.find",
        "megasink.cpu.prepare_process",
    ),
    *(
        "megasink.analysis.run_analysis",
        "megasink.analysis.run_sweep",
        "megasink.transformers.load_hf_folder",
    ),
)
OF_TRAIN_ALONE = {"megatron", "psutil", "sentencepiece", "tensorboard"}


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


def may_import(module: str, name: str) -> bool:
    """Whether a module of the package may import a name, by the table of rooms."""
    room = [*module.split("."), "__init__"][1]
    first, *rest = name.split(".")
    if first in sys.stdlib_module_names:
        return True
    rooms = set(ROOMS[room][0].split()) | {room}
    rooms |= {*GROUND} if "ground" in rooms else set()
    if first != "megasink":
        return first in ROOMS[room][1].split()
    return not rest or rest[0] in rooms or rest[0] not in ROOMS


def violations(path: Path, module: str) -> list[str]:
    """What a file imports that its room may not."""
    found = []
    tree = ast.parse(path.read_text())
    for line, name in imports(tree, module, path.name == "__init__.py"):
        allowed = may_import(module, name)
        for part, names in PARTS.items():
            if inside(module, part) and name.split(".")[0] not in sys.stdlib_module_names:
                allowed &= any(inside(name, other) for other in {part, *names})
        if not allowed:
            found.append(f"{module}:{line} imports {name}")
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
    commands = {f"megasink.cli.{name.replace('-', '_')}" for name in {*COMMANDS} - {*OF_TRAIN}}
    assert commands <= files.keys()
    assert {*LIGHT} <= files.keys()
    assert heavy((*LIGHT, *commands), files) == []
    found = reached(LIGHT, files)
    assert {"torch", "transformers", "megasink.analysis.capture.probe"} <= found.keys()


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


def test_every_room_and_file_is_in_the_table_and_no_two_rooms_import_each_other():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms | {path.stem for path in PACKAGE.glob("*.py")} == ROOMS.keys()
    above = {name: {*names.split()} & ROOMS.keys() for name, (names, _) in ROOMS.items()}
    assert [(a, b) for a in rooms for b in above[a] & rooms if a in above[b]] == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("megasink.balance.loss", "import megatron.core"),
        ("megasink.balance.loss", "from megatron import core"),
        ("megasink.errors", "def f():\n    from megasink.attention import op"),
        ("megasink.attention.flash", "import numpy"),
        ("megasink.attention.flash", "from megasink.config import Scope"),
        ("megasink.attention.flash", "from ..config import Scope"),
        ("megasink.analysis.metrics.scores", "from megasink.attention import attention"),
        ("megasink.megatron.torch_norm", "from megasink.training import run_dir"),
        ("megasink.megatron.torch_norm", "from megasink import training"),
        ("megasink.megatron.torch_norm", "from .. import training"),
        ("megasink.figures.run_figure", "import megasink.training.metrics_writer"),
        ("megasink.training.launch", "from megasink.convert import weight_table"),
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
        ("megasink.megatron.torch_norm", "from megatron.core import mpu"),
        ("megasink.balance.loss", "from megasink.attention.constants import SINK_EPSILON"),
        ("megasink.cli.train", "from megasink.training.launch import launch"),
        ("megasink.attention.flash", "import math, torch\nfrom megasink.errors import UserError"),
        ("megasink.attention.flash", "from . import reference\nfrom .kernels import base"),
        ("megasink.figures.run_figure", "from megasink import __version__"),
        ("megasink.convert.weight_table", "import torch.nn"),
    ],
)
def test_what_is_allowed_is_not_reported(tmp_path, module, line):
    path = tmp_path / "good.py"
    path.write_text(line + "\n")
    assert violations(path, module) == []


def test_a_parsed_command_line_stays_in_cli():
    """Options below it are records of their own, which nothing writes into."""
    below = ("analysis", "attention", "balance", "transformers")
    parsers = {
        str(path.relative_to(PACKAGE))
        for room in below
        for path in (PACKAGE / room).rglob("*.py")
        if any(
            name.split(".")[0] == "argparse"
            for _, name in imports(ast.parse(path.read_text()), path.stem)
        )
    }
    assert parsers == set()
