"""``python -m megasink.training.preflight``: check command lines before any rank is started.

A process of its own: Megatron takes 0.8 GB, and the CPU platform is for a whole process.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import IO, Any, NamedTuple

from megasink import cpu, plugins
from megasink.checkpoints.model_arguments import plain
from megasink.console import package_warnings, signals
from megasink.cpu.prepare_process import prepare_process
from megasink.errors import ConfigError, UserError
from megasink.megatron.argument_parser import known_flags
from megasink.training import parse_arguments, recipes
from megasink.training.flag_file import given_device


class Line(NamedTuple):
    """A command line: flags of its ranks, how many to start, and how many the run had last."""

    flags: Sequence[str]
    ranks: int | None = None
    before: int | None = None


def check(lines: Iterable[Line]) -> list[Namespace | ConfigError]:
    """Return the arguments of each line as JSON has them, or what refuses it."""
    lines = list(lines)
    on_cpu = [given_device(line.flags) == "cpu" for line in lines]
    answers = {kind: iter(_asked(lines, on_cpu, kind)) for kind in set(on_cpu)}
    return [next(answers[kind]) for kind in on_cpu]


def _asked(lines: list[Line], on_cpu: list[bool], kind: bool) -> Iterable[Namespace | ConfigError]:
    with tempfile.TemporaryFile("w+") as file:
        json.dump([line for line, its in zip(lines, on_cpu, strict=True) if its == kind], file)
        file.seek(0)
        if (code := start(file)) > 0:
            raise SystemExit(code)  # it has printed why
        if code:
            raise UserError(f"the check of the command line was killed by signal {-code}")
        file.seek(0)
        answers = json.load(file)
    for answer in answers:
        problems = answer.get("problems")
        yield ConfigError(problems) if problems else Namespace(**answer["args"])


def start(file: IO[str]) -> int:
    """Run `main` in a process; its answers replace the lines in the file. Return its exit code."""
    # Ctrl-C is for the launcher, which then ends this process.
    command = [sys.executable, "-m", __name__]
    return subprocess.run(command, stdin=file, start_new_session=True, check=False).returncode


def main() -> int:
    """Answer the lines in the file that is stdin; errors of the machine are one line."""
    return signals.run(_main)


def _main() -> int:
    lines = [Line(*line) for line in json.load(sys.stdin)]
    with package_warnings.hidden():
        text = json.dumps(list(map(_answer, lines)))
    with os.fdopen(os.dup(0), "w") as file:
        file.seek(0)
        file.truncate()
        file.write(text)
    return 0


def _answer(line: Line) -> dict[str, Any]:
    try:
        args = _checked(line)
    except UserError as error:
        return {"problems": getattr(error, "problems", [str(error)])}
    return {"args": {name: plain(value) for name, value in vars(args).items()}}


def _checked(line: Line) -> Namespace:
    plugins.load(line.flags)
    prepare_process(given_device(line.flags))
    args = parse_arguments.read(line.flags)
    if args.expanded_recipe and not args.resume:
        known = known_flags()
        for label in args.expanded_recipe:
            recipes.read(label.rpartition("@")[0], known)
    args.world_size = line.ranks or ranks_to_start(args, line.before)
    parse_arguments.validate(args)
    from megasink.megatron.model_of_arguments import model_config
    from megasink.training.checks import host_memory

    os.environ["LOCAL_WORLD_SIZE"] = str(args.world_size)
    if problems := list(host_memory.problems(args)):
        raise ConfigError(problems)
    with parse_arguments.refusals_of_megatron():
        model_config(args).finalize()
    return args


def ranks_to_start(args: Namespace, before: int | None = None) -> int:
    """Return one rank per CUDA device, or else one model replica; `before` if that fits here."""
    replica, devices = parse_arguments.replica_ranks(args), 0
    if args.device != "cpu" and cpu.cuda_present():
        import torch

        devices = torch.cuda.device_count()
    if before and before % replica == 0 and not 0 < devices < before:
        return before
    return devices or replica


if __name__ == "__main__":
    sys.exit(main())
