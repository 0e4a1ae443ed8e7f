"""Every line in README and docs is one that can be typed: flags, files and options exist."""

import ast
import contextlib
import importlib.util
import runpy
import subprocess
import sys

import pytest

import megasink
from megasink import cli
from megasink.cli.convert_from_hf import train_line
from megasink.options.command_parser import CommandParser
from megasink.training import recipes
from megasink.training.parse_arguments import set_decay
from tests.documented import (
    EXAMPLE,
    IMPORTED,
    ROOT,
    blocks,
    calls,
    megasink_call,
    shown,
    train_lines,
)
from tests.parsing import read, refuse

KINDS = {"bash", "bash cluster", "text", "python", "toml"}


def names_of(module):
    """What a module of megasink binds or lists in `__all__`, without importing it."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Constant):
            names.add(node.value)
    return names


def test_python_uses_what_megasink_has():
    """Names imported from megasink, and attributes of the package, in lines that are not run."""
    found = []
    for block in (block for block in blocks() if block.kind == "python"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megasink"):
                known = names_of(node.module)
                found += [(block.name, name.name, name.name in known) for name in node.names]
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "megasink":
                there = node.attr in megasink.__all__ or (ROOT / "megasink" / node.attr).is_dir()
                found.append((block.name, node.attr, there))
    assert len(found) >= 10
    assert [item for item in found if not item[2]] == []


class _Parsed(Exception):
    """A command line was read to its end."""


def test_every_block_is_of_a_kind_that_is_tested():
    kinds = {block.name: block.kind for block in blocks()}
    assert {name: kind for name, kind in kinds.items() if kind not in KINDS} == {}
    # What is run as it is written stands in README alone: tests/test_readme.py runs it.
    assert {name.split(":")[0] for name, kind in kinds.items() if kind == "bash"} == {"README.md"}


@pytest.mark.parametrize("call", calls(), ids=lambda call: f"{call.where} {shown(call)[:50]}")
def test_a_line_is_read_to_its_end(call, monkeypatch):
    line = megasink_call(call)
    if line is None:
        programs = ("vllm", "pip", "unzip", "scancel", "python", "kubectl", "torchrun")
        assert call.program in programs
        if call.program == "python" and call.words[0] == "-m":
            assert importlib.util.find_spec(call.words[1])
        elif call.program == "python":
            assert call.words[0] == "-c"
            ast.parse(call.words[1])
        return
    command, *flags = line[0]
    if command == "train":
        return  # below, with data
    if command == "plan":
        return  # tests/plan/test_plan.py

    def stop(*args, **kwargs):
        parse_args(*args, **kwargs)
        raise _Parsed

    parse_args = CommandParser.parse_args
    with contextlib.suppress(KeyError):
        main = cli.main_of(command)
    monkeypatch.setattr(CommandParser, "parse_args", stop)
    with pytest.raises(_Parsed):
        main(flags)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files of these names, for checks that do not open them."""
    folder = tmp_path_factory.mktemp("documented")
    for suffix in ("bin", "idx"):
        (folder / f"text.{suffix}").write_bytes(b"")
    return folder


def test_the_lines_that_train_are_accepted(data):
    """Before Megatron is imported; tests/training/test_checks.py asks the ranks too."""
    lines = train_lines(data / "text", data)
    assert sum(str(EXAMPLE.name) in shown(call) for call in calls()) >= 6
    assert len(lines) >= 9
    for flags, ranks in lines.values():
        refuse(flags, ranks)


def test_the_line_that_an_import_prints_lacks_nothing(data, tmp_path):
    (tmp_path / "flags.txt").write_text(IMPORTED.replace("/data/corpus-tokenizer", str(data)))
    line = train_line(tmp_path)
    assert "--seq-length 2048" in line
    for name, value in (("PREFIX", f"{data}/text"), ("STEPS", "10"), ("LR", "1e-5")):
        line = line.replace(f" {name}", f" {value}")
    read = f"printf '%s\\n' {line.removeprefix('megasink train ')}"
    flags = subprocess.run(["bash", "-c", read], capture_output=True, text=True, check=True)
    refuse(flags.stdout.splitlines(), 1)


@pytest.mark.parametrize("steps", [1, 2, 100, 21400, 100000])
def test_the_schedule_of_the_example_follows_its_length(steps, data, monkeypatch):
    for name, value in (("DATA_PATH", data / "text"), ("TOKENIZER", data)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["x", f"--train-iters={steps}", "--run-dir", "nowhere/run"])
    flags = recipes.expanded(runpy.run_path(str(EXAMPLE))["flags"]())
    refuse(flags, 64)
    args = read(flags)
    set_decay(args)
    if steps == 21400:
        assert args.lr_wsd_decay_iters == 4280  # the paper's last fifth
    assert abs(args.lr_wsd_decay_iters - steps / 5) < 1
