"""``megasink plan``: check a training command line, step some of its ranks, show the whole job."""

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from megasink import plugins
from megasink.console.json_output import add_json, as_text
from megasink.console.progress import Tell, progress
from megasink.errors import ConfigError, UserError
from megasink.options.command_parser import Reading
from megasink.plan import hollow, launch_script
from megasink.plan.helper import ANSWER
from megasink.plan.stand_in_flags import with_stand_ins
from megasink.plan.whole_job import DEVICES, Record, rank_of, stages_to_step
from megasink.training import recipes
from megasink.training.flag_file import given_device, named_values
from megasink.training.parse_arguments import look

# More than any GPU has: a run that does not fit is shown, not refused.
_GIB = 1 << 16
_LOG = "log"


def main(argv: Sequence[str] | None = None) -> int:
    """Show the memory, communication and time of a run of megasink train. Needs no GPU.

    Give the flags of megasink train, with --ranks for the GPUs of the whole job. The trainer itself
    is built and stepped on a hollow GPU, as one rank of each kind of pipeline stage: counts and
    bytes are those of the real host code. Kernels do not run, so the time is only that of the
    FLOPs at --utilization.
    """
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        parser = _parser()
        parser.print_help()
        parser.exit()
    args, flags = read_line(argv)
    flags = with_stand_ins(argv, flags)
    look(flags, argparse.ArgumentParser("megasink plan", allow_abbrev=False, add_help=False))
    try:
        with Helper(DEVICES[args.gpu].capability, flags) as helper:
            records = _step(helper, args.ranks, flags)
    except ConfigError as error:
        cure = ", or --vocab-size N for a plan"  # a plan accepts it in place of a tokenizer
        problems = (p + cure * p.startswith("no tokenizer:") for p in error.problems)
        raise ConfigError(problems) from error
    for note in records[0]["notes"]:
        print(f"megasink: {note}", file=sys.stderr)
    from megasink.plan.plan_tables import as_json, show

    if args.json:
        print(as_text(as_json(records, DEVICES[args.gpu], args.utilization)))
    else:
        show(records, args.gpu, args.utilization)
    return 0


def read_line(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the plan's own options, and the flags of training."""
    read = Reading(_parser(), recipes.expanded(argv))
    args, problems, words = read.namespace, list(read.problems), list(read.unknown)
    if read.problems:
        raise ConfigError(problems)
    if args.set and args.script is None:
        problems.append(f"--set {args.set[0]} needs --script")
    if args.script is not None:
        words = [*_of_script(args, words), *words]
    if args.ranks is not None and args.ranks < 1:
        problems.append(f"--ranks {args.ranks}: use 1 or more")
    if not 0 < args.utilization <= 1:
        problems.append(f"--utilization {args.utilization}: use more than 0, and at most 1")
    if args.resume:
        problems.append("--resume does not work in a plan: pass all flags of the run instead")
    if given_device(read.unknown):
        problems.append("--device: a plan is always for the GPUs of --gpu: drop the flag")
    if problems:
        raise ConfigError(problems)
    return args, [*words, *plugins.flags(argv)]


def _of_script(args: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Return the flags of --script that the command line does not give; its ranks are a default."""
    pairs = [text.partition("=") for text in args.set]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise UserError(f"--set {wrong[0]}: give NAME=VALUE")
    given = {name: value for name, _, value in pairs}
    found = launch_script.read(args.script, given, [name for name, _ in named_values(words)])
    args.ranks = found.ranks if args.ranks is None else args.ranks
    for note in found.notes:
        print(f"megasink: {args.script}: {note}", file=sys.stderr)
    return found.flags


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megasink plan",
        usage="megasink plan [--ranks N] [--gpu NAME] [--json] FLAGS_OF_MEGASINK_TRAIN",
        description=inspect.cleandoc(main.__doc__ or ""),
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this help and exit")
    text = "number of GPUs of the job; default: enough for one copy of the model"
    parser.add_argument("--ranks", type=int, help=text)
    text = (
        "read flags and --ranks from a launch script (shell, or YAML with MODEL_ARGS) without "
        "running it; flags on the command line override those of the script"
    )
    parser.add_argument("--script", type=Path, help=text)
    text = "value of a variable in the script; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    parser.add_argument("--gpu", choices=DEVICES, default="h100", help="default: h100")
    text = "assumed share of the GPU's peak rate, for the time estimate; default: 0.4"
    parser.add_argument("--utilization", type=float, default=0.4, help=text)
    add_json(parser)
    plugins.add_flag(parser)
    # As on the command line of train; a plan writes nothing.
    parser.add_argument("--run-dir", help=argparse.SUPPRESS)
    parser.add_argument("--resume", nargs="?", const="newest", help=argparse.SUPPRESS)
    return parser


def _step(helper: "Helper", ranks: int | None, flags: Sequence[str]) -> list[Record]:
    """Return the records from which the whole job follows; ranks None: of one model replica."""
    with progress("planning", None, "ranks", every=10.0) as tell:
        first = helper.step(0, ranks, flags, tell)
        facts = first["job"]
        ranks = facts["ranks"]
        last = not (facts["packed"] and facts["tensor"] > 1)
        records = [first]
        for stage in stages_to_step(facts):
            if (rank := rank_of(stage, facts, last=last)) != 0 and stage != first["stage"]:
                records.append(helper.step(rank, ranks, flags, tell))
    return records


class Helper:
    """Context manager for the process on the hollow GPU, which steps ranks."""

    def __init__(self, capability: int, flags: Sequence[str]):
        if reason := hollow.missing():
            raise UserError(reason)
        self._environment = hollow.environment(hollow.Device(capability, _GIB))
        self._plugins = plugins.flags(flags)
        self._done = 0

    def __enter__(self) -> Self:
        self._temporary = tempfile.TemporaryDirectory(prefix="megasink-plan-")
        self._folder = Path(self._temporary.name)
        command = [sys.executable, "-W", "ignore", "-m", "megasink.plan.helper", str(self._folder)]
        with (self._folder / _LOG).open("w") as log:
            self._process = subprocess.Popen(
                [*command, *self._plugins],
                env=os.environ | self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._temporary.cleanup()

    def step(self, rank: int, ranks: int | None, flags: Sequence[str], tell: Tell) -> Record:
        """Return the record of a rank, as `megasink.plan.rank_step.step_as` describes it."""
        tell(self._done, f"stepping rank {rank}{f' of {ranks}' if ranks else ''}", now=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"rank": rank, "ranks": ranks, "flags": list(flags)}
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise UserError(f"the plan's helper process failed: {self._error()}") from error
        code = self._process.stdout.readline().strip()
        self._done += 1
        if code != "0":
            raise UserError(f"rank {rank} of the plan failed: {self._error()}")
        record: dict[str, Any] = json.loads((self._folder / ANSWER).read_text())
        if "problems" in record:
            raise ConfigError(record["problems"])
        return record

    def _error(self) -> str:
        """Return the last line of the log that names an error."""
        lines = (self._folder / _LOG).read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
        return (errors or lines or ["the process ended without a message"])[-1]
