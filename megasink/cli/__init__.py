"""The ``megasink`` command: one entry point for every subcommand."""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable, Collection, Sequence

import megasink
from megasink import plugins
from megasink.console import package_warnings, signals
from megasink.errors import UserError, unknown_name
from megasink.options.command_parser import CommandParser
from megasink.options.extras import require_train

# Group -> command -> description; each is a module of `megasink.cli` with a ``main``, imported on
# demand.
GROUPS = {
    "look inside a model (start here: analyze)": {
        "analyze": "sinks, heads and hidden states of a model, or of a run over time, as a report",
        "ablate": "the loss or accuracy of a model with inactive or chosen heads off",
        "sweep": "sinks, inactive heads and loss by length, BOS and repeated first tokens",
        "evaluate": "scores on lm-evaluation-harness tasks, with or without interventions",
        "report": "one page that compares several analyses",
    },
    "train a model (start here: demo)": {
        "demo": "watch heads collapse without the head-balance loss, but not with it (minutes)",
        "data": "text -> tokenizer -> Megatron .bin/.idx",
        "train": "start the ranks of one node and train; every Megatron flag passes through",
        "finetune": "adapt a Hugging Face model on conversations, and export it again",
        "generate": "continue a prompt with a trained model",
    },
    "follow and plan runs": {
        "compare": "curves of one or several runs on one page, and a table of final numbers",
        "checkpoints": "list and verify the checkpoints of a run",
        "recipes": "list the recipes of train --recipe, or show the flags of one, or of a run",
        "plan": "memory, communication and time of a run on any number of GPUs; needs no GPU",
    },
    "move models, and check this machine": {
        "convert-to-hf": "a checkpoint -> a Hugging Face folder, verified",
        "adopt": "a checkpoint of Megatron-LM or Megatron-Bridge -> a run, without a copy",
        "convert-from-hf": "a Hugging Face folder -> a run to train from",
        "doctor": "installed packages, the kernels that will run, and a test of both",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}
# These use no variant, metric or conversion target.
WITHOUT_PLUGINS = ("demo", "data", "recipes", "checkpoints")
# These always run Megatron; others need it only for runs, and report that when given one.
OF_TRAIN = ("demo", "train", "plan", "generate", "adopt", "convert-from-hf")
# They start processes with their own logs, which also get the messages of other packages.
WITH_LOGS = ("demo", "train", "plan")


def main_of(command: str) -> Callable[[Sequence[str]], int]:
    """Return the ``main`` of a command in `COMMANDS`."""
    name = f"megasink.cli.{command.replace('-', '_')}"
    main: Callable[[Sequence[str]], int] = importlib.import_module(name).main
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; user errors print one line to stderr and exit with code 2.

    Failures of the machine do the same. Signals exit with 128 plus their number, after everything
    half-written is removed.
    """
    return signals.run(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = CommandParser(
        prog="megasink",
        description="Sink and gated attention with head balancing, on Megatron-Core.",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="version", version=f"megasink {megasink.__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    if argv and argv[0] in COMMANDS:
        args = argparse.Namespace(command=argv[0], arguments=argv[1:], help=False)
    else:
        args = parser.parse_args(argv)
    if args.help or args.command is None:
        print("Measure, switch off and train attention heads: sinks, gates, head balance.")
        for group, commands in GROUPS.items():
            print("", f"{group}:", *(f"  {n:15} {text}" for n, text in commands.items()), sep="\n")
        print("", "megasink COMMAND --help shows an example and the flags.", sep="\n")
        return 0 if args.help else 2
    if args.command not in COMMANDS:
        raise UserError(unknown_name("the command", args.command, COMMANDS))
    if args.command in OF_TRAIN:
        require_train(f"megasink {args.command}")
    is_logged = args.command in WITH_LOGS
    with contextlib.nullcontext() if is_logged else package_warnings.hidden():
        if args.command not in WITHOUT_PLUGINS:
            plugins.load(args.arguments, _registered if args.command == "doctor" else dict)
        return main_of(args.command)(args.arguments)


def _registered() -> dict[str, Collection[str]]:
    """Return {kind: names} of everything that is registered now."""
    from megasink.analysis.metrics import metrics
    from megasink.attention import variants
    from megasink.convert.targets import TARGETS

    return {"variant": variants.names(), "metric": list(metrics()), "target": list(TARGETS)}
