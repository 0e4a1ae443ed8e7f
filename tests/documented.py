"""The command lines of README and docs, down to the flags that reach megasink.

They run in bash where the programs of a cluster are stubs: srun, sbatch and docker check their own
options and run the line behind them; megasink, torchrun and Python note how they were called.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest import mock

from megasink.training import recipes

ROOT = Path(__file__).parents[1]
OTHERS = (
    "docker/README.md",
    "examples/real_models/results.md",
    "examples/replicate/results.md",
    "megasink/attention/README.md",
    "megasink/attention/gate_kernels/README.md",
    "megasink/balance/README.md",
    "megasink/convert/README.md",
    "megasink/plan/hollow/README.md",
    "megasink/training/recipes/README.md",
    "megasink/upstream/README.md",
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *map(ROOT.joinpath, OTHERS)]
EXAMPLE = ROOT / "examples" / "pretrain_gpt_sink.sh"
# What the lines leave to the reader.
GIVEN = {
    "FLAGS": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 4096 "
    "--max-position-embeddings 4096 --position-embedding-type rope --micro-batch-size 1 "
    "--train-iters 1000 --lr 1e-4 --data-path /data/corpus "
    "--tokenizer-model /data/corpus-tokenizer",
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURM_JOB_ID": "7",
}
IMPORTED = (  # of convert-from-hf
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 2048 "
    "--position-embedding-type rope --tokenizer-model /data/corpus-tokenizer\n"
)
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
# The modules of a reader's own.
MODULES = dict(re.findall(r"^```python (\w+\.py)\n(.*?)^```$", CONTRIBUTING, re.M | re.S))
_NOTED = ("DATA_PATH", "TOKENIZER", "RUN_DIR")

_NOTE = r"""#!/bin/bash
{ printf '%s\0' "${0##*/}" "$DATA_PATH" "$TOKENIZER" "$RUN_DIR" "$@"; printf '\n\0'; } >> "$CALLS"
"""
# The address of this host, and whether the ranks meet here.
_PYTHON = r"""#!/bin/bash
[[ $2 == megasink.training.network ]] && echo 10.0.0.1 1 && exit
"""
_SRUN = r"""#!/bin/bash
while [[ $1 == --* ]]; do
  case $1 in
    --nodes) export SLURM_NNODES=$2; shift 2 ;;
    --ntasks-per-node|--gpus-per-node|--time|--signal) shift 2 ;;
    --requeue|--kill-on-bad-exit=1) shift ;;
    --wrap) exec bash -c "$2" ;;
    *) echo "${0##*/}: unknown option $1" >&2; exit 1 ;;
  esac
done
[[ ${0##*/} == srun ]] || export SLURM_NNODES=$(sed -n 's/^#SBATCH --nodes=//p' "$1")
exec "$@"
"""
_DOCKER = r"""#!/bin/bash
kind=$1; shift
if [[ $kind == build ]]; then
  while [[ $1 == -* ]]; do
    case $1 in
      -f) file=$ROOT/$2; [[ -f $file ]] || exit 1 ;;
      -t) ;;
      --build-arg) grep -q "^ARG ${2%%=*}" "$file" || { echo "no ARG $2" >&2; exit 1; } ;;
      *) echo "docker build: unknown option $1" >&2; exit 1 ;;
    esac
    shift 2
  done
  [[ $1 == . ]]; exit
fi
[[ $kind == run ]] || exit 1
while [[ $1 == -* ]]; do
  case $1 in
    --rm|--ipc=host|--network=host|--ulimit=*|--device=*) shift ;;
    --gpus|--ulimit|-v) shift 2 ;;
    -e) export "${2?}"; shift 2 ;;
    *) echo "docker run: unknown option $1" >&2; exit 1 ;;
  esac
done
[[ $1 == megasink* ]] || exit 1
shift
exec "${@//\/opt\/megasink/$ROOT}"
"""
_STUBS = {
    **dict.fromkeys(("megasink", "torchrun", "vllm", "pip", "unzip"), _NOTE),
    **dict.fromkeys(("scancel", "kubectl"), _NOTE),
    **dict.fromkeys(("srun", "sbatch"), _SRUN),
    "python": _PYTHON + _NOTE.partition("\n")[2],
    "docker": _DOCKER,
    "git": '#!/bin/sh\nmkdir -p "$3"\n',  # clone
    "scontrol": "#!/bin/sh\necho node1\n",
    "nvidia-smi": "#!/bin/sh\nfor i in 0 1 2 3 4 5 6 7; do echo GPU $i; done\n",
    "grep": "#!/bin/sh\nexit 0\n",  # of what unzip would print
}


class Block(NamedTuple):
    """A fenced block of a page."""

    name: str
    kind: str
    text: str


class Call(NamedTuple):
    """How a program was called.

    Attributes:
        where: page and line of the block.
        program: its name.
        words: its arguments.
        variables: of DATA_PATH, TOKENIZER and RUN_DIR, those that are set.
    """

    where: str
    program: str
    words: list[str]
    variables: dict[str, str]


def blocks() -> Iterator[Block]:
    """Every fenced block of README and docs."""
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"^```(.*)\n([\s\S]*?)^```$", text, re.M):
            line = text[: found.start()].count("\n") + 2
            yield Block(f"{page.relative_to(ROOT)}:{line}", found[1], found[2])


@cache
def calls() -> tuple[Call, ...]:
    """Every call that the lines of a shell make, but for the commands of README's quick start.

    Raises:
        AssertionError: a line fails.
    """
    found: list[Call] = []
    with TemporaryDirectory() as folder:
        binaries = Path(folder, "bin")
        binaries.mkdir()
        for name, text in _STUBS.items():
            (binaries / name).write_text(text)
            (binaries / name).chmod(0o755)
        Path(folder, "OUT").mkdir()
        Path(folder, "OUT", "flags.txt").write_text(IMPORTED)
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        for block in blocks():
            if block.kind in ("bash cluster", "text"):
                found += _calls_of(block, Path(folder))
    return tuple(found)


def _calls_of(block: Block, folder: Path) -> Iterator[Call]:
    text = block.text
    if block.kind == "text":  # TEXT... for one or more, [--flag] for what may be left out, a|b
        text = re.sub(r"\.\.\.|[\[\]]|\|\w+", "", text)
    noted = folder / "calls"
    noted.write_text("")
    done = subprocess.run(
        ["bash", "-eu", "-c", text],
        cwd=folder,
        env={
            **{k: v for k, v in os.environ.items() if k not in _NOTED},
            **GIVEN,
            **dict.fromkeys(_NOTED, ""),
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "PYTHON": "python",
            "CALLS": str(noted),
            "ROOT": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, f"{block.name}: {done.stderr}"
    records = noted.read_text().split("\0\n\0")[:-1]
    assert records or "docker build" in text, f"{block.name} runs nothing"
    for record in records:
        program, *values = record.split("\0")
        variables = dict(zip(_NOTED, values[:3], strict=True))
        given = {name: value for name, value in variables.items() if value}
        yield Call(block.name, program, values[3:], given)


def megasink_call(call: Call) -> tuple[list[str], int] | None:
    """The line of `megasink`, or of the example, that a call comes to, and its number of ranks.

    Returns:
        None for a program that is another one.
    """
    words, ranks = list(call.words), 1
    if call.program == "megasink":
        if words[0] == "train" and "--ranks" in words:  # of the launcher
            place = words.index("--ranks")
            ranks = int(words[place + 1])
            del words[place : place + 2]
        return words, ranks
    if call.program == "python" and words[:2] in (
        ["-m", "torch.distributed.run"],
        ["-m", "megasink.training.multi_host_torchrun"],
    ):
        words = words[2:]
    elif call.program != "torchrun":
        return None
    while words[0].startswith("--"):
        flag, *words = words
        value = "" if "=" in flag else words.pop(0)
        if flag in ("--nnodes", "--nproc-per-node"):
            ranks *= int(value)
    if words[:2] == ["-m", "megasink"]:
        return words[2:], ranks
    script, *flags = words
    if script == "pretrain_gpt.py":  # of Megatron-LM: tests/megatron/test_integrations.py
        return None
    assert (ROOT / script).resolve() == EXAMPLE, script
    with (
        mock.patch.dict(os.environ, call.variables, clear=False),
        mock.patch.object(sys, "argv", [script, *flags]),
    ):
        for name in set(_NOTED) - set(call.variables):
            os.environ.pop(name, None)
        return ["train", *runpy.run_path(str(EXAMPLE))["flags"]()], ranks


def with_files(words: Sequence[str], folder: Path, names: Mapping[str, str]) -> list[str]:
    """Words of a line with files that are there, also in the file that docs/recipes.md shows.

    Args:
        folder: where that file is written; every TOML file on the line becomes it.
        names: {path in the docs: path that is there}.
    """
    (text,) = (b.text for b in blocks() if b.kind == "toml" and "docs/recipes.md" in b.name)
    for name, there in names.items():
        text = text.replace(f'"{name}"', f'"{there}"')
    config = folder / "shown.toml"
    config.write_text(text)
    return [str(config) if word.endswith(".toml") else names.get(word, word) for word in words]


def train_lines(data: Path, tokenizer: Path) -> dict[str, tuple[list[str], int]]:
    """{place: (flags of a rank, ranks)} of every line that trains, on data that is there."""
    found = {}
    for number, call in enumerate(calls()):
        line = megasink_call(call)
        if line is None or line[0][0] != "train":
            continue
        names = {"/data/corpus-tokenizer": str(tokenizer), "/data/corpus": str(data)}
        words = recipes.expanded(with_files(line[0][1:], data.parent, names))
        found[f"{call.where} {number}"] = (words, line[1])
    return found


def shown(call: Call) -> str:
    """A call as one types it."""
    return shlex.join([call.program, *call.words])


def register_variant() -> None:
    """Do what the import of the variant's module does."""
    exec(MODULES["my_variant.py"], {"__name__": "my_variant"})
