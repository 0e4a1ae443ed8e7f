"""``megasink``: one entry for everything that is done from a shell."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence

import megasink
from megasink.command_line import CommandParser, unknown_name
from megasink.errors import Stopped, UserError


def _data(argv: Sequence[str]) -> int:
    from megasink.data.cli import main

    return main(argv)


def _train(argv: Sequence[str]) -> int:
    from megasink.train.stop import ending_at_once

    with ending_at_once("starting"):
        from megasink.train.launch import main

        return main(argv)


def _demo(argv: Sequence[str]) -> int:
    from megasink.demo import main

    return main(argv)


def _generate(argv: Sequence[str]) -> int:
    from megasink.train.generate import main

    return main(argv)


def _convert_to_hf(argv: Sequence[str]) -> int:
    from megasink.convert.cli import to_hf_main

    return to_hf_main(argv)


def _convert_from_hf(argv: Sequence[str]) -> int:
    from megasink.convert.cli import from_hf_main

    return from_hf_main(argv)


def _plot(argv: Sequence[str]) -> int:
    from megasink.report.curves import main

    return main(argv)


def _compare(argv: Sequence[str]) -> int:
    from megasink.report.compare import main

    return main(argv)


def _analyze(argv: Sequence[str]) -> int:
    from megasink.train.analyze import main

    return main(argv)


def _sweep(argv: Sequence[str]) -> int:
    from megasink.train.analyze import sweep_main

    return sweep_main(argv)


def _trace(argv: Sequence[str]) -> int:
    from megasink.train.trace import main

    return main(argv)


def _report(argv: Sequence[str]) -> int:
    from megasink.report.pages import main

    return main(argv)


def _info(argv: Sequence[str]) -> int:
    from megasink.info import main

    return main(argv)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "demo": (_demo, "train a small sink-attention GPT on this machine, start to end"),
    "data": (_data, "text -> tokenizer -> Megatron .bin/.idx"),
    "train": (_train, "start the ranks of one node and train; every Megatron flag passes through"),
    "generate": (_generate, "continue a prompt with a trained model"),
    "convert-to-hf": (_convert_to_hf, "a checkpoint -> a Hugging Face folder, verified"),
    "convert-from-hf": (_convert_from_hf, "a Hugging Face folder -> a run to train on from"),
    "plot": (_plot, "draw loss, imbalance and head importance of a run"),
    "compare": (_compare, "curves of several runs on one page, and a table of how they ended"),
    "analyze": (_analyze, "sinks, heads and hidden states of a model, as a report"),
    "sweep": (_sweep, "sinks, inactive heads and loss by length, BOS and repeated first tokens"),
    "trace": (_trace, "the same over the checkpoints of a run, against tokens"),
    "report": (_report, "one page about several analyses"),
    "info": (_info, "versions, platform, and which attention kernel runs here and why"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; what the user can mend is one line on the error stream and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    lines = "\n".join(f"  {name:15} {text}" for name, (_, text) in COMMANDS.items())
    parser = CommandParser(
        prog="megasink",
        description="Sink and gated attention with head balancing, on Megatron-Core.",
        epilog=f"commands:\n{lines}\n\nmegasink COMMAND --help tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megasink {megasink.__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    try:
        args = parser.parse_args(argv)
        if args.command is None:
            raise UserError(f"give a command: {', '.join(COMMANDS)} (megasink --help)")
        if args.command not in COMMANDS:
            raise UserError(unknown_name("the command", args.command, COMMANDS))
        return COMMANDS[args.command][0](args.arguments)
    except Stopped as stop:
        with contextlib.suppress(OSError):  # the terminal was closed
            print(f"megasink: {stop}", file=sys.stderr, flush=True)
        return stop.exit_code
    except UserError as error:
        print(f"megasink: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(f"megasink: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megasink: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
