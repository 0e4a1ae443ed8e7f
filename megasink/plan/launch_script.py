"""Flags of training out of a launch script: shell, or the YAML of Megatron's functional tests."""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

from megasink.errors import UserError
from megasink.files.json_file import read_text
from megasink.options.dataclass_flags import flag_of
from megasink.options.megatron_flags import having
from megasink.plan.shell import MARK, Shell
from megasink.training.flag_file import named_values

# Flags whose value only names a place or a text, and may stay open.
_NAMES = {flag_of(name)[2:] for name in having("read", "written", "place", "data")}
_NAMED = re.compile(r".*(path|dir|file|checkpoint|load|save|name|project|entity|prefix|config)")
# Flags that change nothing that a plan reports besides the length of the run.
_WITHOUT_EFFECT = re.compile(
    r"(eval|save|log|exit|timing|lr|min-lr|train|seed|weight|clip|init|adam|wandb|tensorboard|num-work"
    r"|distributed|attention-backend|tokenizer)(-.*)?"
)
_OPTIONAL = re.compile(r"(?i).*(arg|opt|flag|extra|param)\w*|[@*]")
_COUNTS = {
    "nproc": r"--nproc[-_]per[-_]node",
    "nodes": r"--nnodes|--actor-num-nodes|-N|--nodes",
    "gpus": r"--actor-num-gpus-per-node|--ntasks-per-node|--gpus-per-node|--gres",
    "all": r"-np|-n|--ntasks",
}


class Script(NamedTuple):
    """Flags of a script, the ranks that it starts (None: not written), and what was left open."""

    flags: list[str]
    ranks: int | None
    notes: list[str]


def read(path: Path, given: Mapping[str, str], overridden: Collection[str]) -> Script:
    """Read a script, with variables `given` and flags `overridden`, without running anything."""
    # Raises UserError for values that only a command or the caller knows, each with its variable.
    if not path.is_file():
        raise UserError(f"--script {path}: no such file")
    shell = Shell(path, given)
    if path.suffix in (".yaml", ".yml"):
        launcher, words = list[str](), _of_yaml(path, shell)
    else:
        launcher, words = _command(shell)
    if not any(word.startswith("--") for word in words):
        raise UserError(f"--script {path} has no command with Megatron flags (…/NAME.py --FLAG)")
    flags, empty, absent = list[str](), set[str](), dict[str, str]()
    unused = list[str]()
    for name, values in named_values(words):
        shown = MARK.sub(lambda found: f"${found[1] or '(...)'}", f"--{name}")
        absent |= dict.fromkeys(MARK.findall(name), shown)
        if not name or MARK.search(name) or name in overridden:
            continue
        named = name in _NAMES or _NAMED.fullmatch(name)
        if not named and _WITHOUT_EFFECT.fullmatch(name) and MARK.search(" ".join(values)):
            unused.append(f"--{name}")
            continue
        flags.append(f"--{name}")
        for value in values:
            whole = MARK.fullmatch(value)
            if whole and _OPTIONAL.fullmatch(whole[1]):
                empty.add(whole[1])
                continue
            if not named:
                absent |= dict.fromkeys(MARK.findall(value), f"--{name}")
            flags.append(MARK.sub(r"$\1", value).strip("'\""))
    if absent:
        absent |= {name: "a condition" for name in shell.asked if name.isdecimal()} | absent
        uses = ", ".join(f"{name or 'a command'} ({flag})" for name, flag in absent.items())
        raise UserError(
            f"--script {path}: no value for {uses}: pass --set NAME=VALUE or the flag itself"
        )
    notes = [f"no value for {', '.join(unused)}: flags ignored"] * bool(unused)
    notes += [f"{name} is not set: treated as empty" for name in sorted(empty)]
    notes += [f"{name} was not found" for name in dict.fromkeys(shell.missing)]
    ranks, least = _ranks(launcher, words, path), _least_ranks(dict(named_values(flags)))
    if ranks is not None and least and ranks % least:
        notes.append(f"{ranks} ranks are not a multiple of {least}: planned for {least} ranks")
        ranks = None
    return Script(flags, ranks, notes)


def _least_ranks(given: Mapping[str, list[str]]) -> int:
    """Return the least number of ranks that hold a model; 0 if the flags are wrong."""
    names = ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")
    texts = [given.get(f"{name}-parallel-size", ["1"])[-1:] for name in names]
    if not all(text and text[0].isdecimal() for text in texts):
        return 0
    tensor, stages, context, experts, _ = (int(text[0]) for text in texts)
    each = int(given.get("expert-tensor-parallel-size", [str(tensor)])[-1])
    return stages * math.lcm(tensor * context, experts * each)


def _of_yaml(path: Path, shell: Shell) -> list[str]:
    """Return the flags under MODEL_ARGS; true stands for a switch."""
    import yaml  # transformers requires it

    class Texts(yaml.SafeLoader):  # scalars as they are written, and merged mappings
        yaml_implicit_resolvers: ClassVar = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}

    try:
        found = yaml.load(read_text(path), Texts)
        flags = found["MODEL_ARGS"].items()
    except yaml.YAMLError as error:
        raise UserError(f"--script {path} is not YAML: {' '.join(str(error).split())}") from error
    except (TypeError, KeyError, AttributeError):
        return []
    words = list[str]()
    for name, value in flags:
        if isinstance(value, dict) or any(not isinstance(one, str) for one in value):
            raise UserError(f"--script {path}: {name} must be a value or a list of values")
        texts = value if isinstance(value, list) else _values(shell.text(f'"{value}"'))
        if value not in ("false", "null", "~"):
            words += [name, *([] if value == "true" else texts)]
    return words


def _values(value: str) -> list[str]:
    """Return the words of a value as Megatron's test runner does: [a b] are two."""
    if re.fullmatch(r"\[[^]]+\]", value):
        return [word.strip(",") for word in value[1:-1].split()]
    numbers = re.fullmatch(r"[\d.eE+-]+( +[\d.eE+-]+)+", value)
    return value.split() if numbers else [value] * bool(value)


def _command(shell: Shell) -> tuple[list[str], list[str]]:
    """Return the words before and after the program of the command with most flags."""
    found: list[tuple[list[str], list[str]]]
    found = [([], [*value.values()]) for value in shell.values.values() if type(value) is dict]
    found += [([], value.split()) for value in shell.values.values() if type(value) is str]
    found = [pair for pair in found if "--num-layers" in pair[1]]
    for words in shell.commands + shell.written * (not shell.commands):
        programs = [n for n, word in enumerate(words) if word.endswith(".py")]
        last = next((n for n in programs if any(w[:2] == "--" for w in words[n + 1 :])), None)
        if last is not None:
            found.append((words[:last], words[last + 1 :]))
    return max(
        found,
        key=lambda pair: (bool(pair[0]), sum(w[:2] == "--" for w in pair[1])),
        default=([], []),
    )


def _ranks(launcher: list[str], words: list[str], path: Path) -> int | None:
    """Return the number of ranks by torchrun's, Ray's, mpirun's or SLURM's counts."""
    batch = re.findall(r"^#SBATCH\s+(.*?)\s*$", read_text(path), re.M)
    text = " ".join([*batch, *launcher, *(w for w in words if w)])
    counts = {}
    for kind, names in _COUNTS.items():
        found = re.findall(rf"(?<!\S)(?:{names})[ =]?(?:gpu:(?:\w+:)?)?(\d+)(?!\S)", text)
        counts[kind] = int(found[-1]) if found else None
    each = counts["nproc"] or counts["gpus"]
    return each * (counts["nodes"] or 1) if each else counts["all"]
