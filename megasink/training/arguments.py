"""Parse a command line into Megatron's and megasink's arguments; report all problems at once."""

import ast
import contextlib
import io
import json
import os
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megasink.errors import ConfigError
from megasink.megatron.arguments import parse_known
from megasink.training import checks, run_dir
from megasink.training.checks.model import set_gated_unit
from megasink.training.checks.required import set_decay
from megasink.training.checks.variants import match_ffn_width
from megasink.training.checks.vocabulary import pin_vocabulary
from megasink.training.flag_table import TABLE

_MOST_FLAGS = 4  # in a message


def parse(argv: Sequence[str], *, checked: bool = False) -> tuple[Namespace, dict[str, Any]]:
    """Parse and validate a command line.

    Args:
        argv: flags without the program name.
        checked: whether `early.refuse` has found nothing in it; then only what depends on this
            process and its device is checked.

    Returns:
        the namespace, with ``padded_vocab_size`` pinned to the tokenizer, and the arguments that
        identify the run, as given (Megatron derives some of them).
    """
    from megatron.training import arguments

    # Megatron requires it for tensor parallelism on GPUs before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    args = parse_known(argv)
    run_dir.use_own_tokenizer(args)
    checks.complete(args)
    problems = checks.problems(args, checked=checked)
    if problems:
        raise ConfigError(problems)
    identity = run_dir.identity_of(args)
    run_dir.set_paths(args)
    # Megatron would still request the optimizer from a GPT checkpoint (checkpointing.py:2210).
    args.no_load_optim = args.no_load_optim or args.finetune or None
    pin_vocabulary(args)
    set_gated_unit(args)
    set_decay(args)
    with _without_argument_list() as printed, refusals_of_megatron(args, printed):
        arguments.validate_args(args)
    if args.match_ffn_width:
        match_ffn_width(args)
    # Megatron sets it in the loop that --skip-train skips.
    args.curr_iteration = 0
    return args, identity


@contextlib.contextmanager
def refusals_of_megatron(args: Namespace, printed: io.StringIO | None = None) -> Iterator[None]:
    """Convert any error that Megatron raises while it validates flags.

    `printed` has Megatron's output, after which it sometimes exits without an error.
    """
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = [f for f in frames if "_sitebuiltins" not in f.filename][-1]  # the file of exit()
        lines = printed.getvalue().splitlines() if printed and isinstance(error, SystemExit) else []
        text = " ".join(str(lines[-1] if lines else error).split())
        text = text or f"{Path(last.filename).name}:{last.lineno}: {last.line}"
        what = ", ".join(_flags_at(last, args, text)) or "this configuration"
        raise ConfigError([f"Megatron refuses {what}: {text}"]) from error


def _flags_at(place: traceback.FrameSummary, args: Namespace, text: str) -> list[str]:
    """Return the flags, with their values, in the statement at a place and in its conditions."""
    line, names = place.lineno or 0, list[str]()
    try:
        source = Path(place.filename).read_text()
    except OSError:  # code without a file
        return []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.If | ast.Assert) or not (
            node.lineno <= line <= (node.end_lineno or 0)
        ):
            continue
        # The walk reaches inner statements last, and their flags count most.
        tested = [n.attr for n in ast.walk(node.test) if isinstance(n, ast.Attribute)]
        names = [*dict.fromkeys([*tested, *names])]
    flags = {entry["dest"]: entry["names"][0] for entry in json.loads(TABLE.read_text())["flags"]}
    values = {flags[name]: getattr(args, name, None) for name in names if name in flags}
    return [
        flag if value is True else f"{flag} {'not given' if value in (None, False) else value}"
        for flag, value in values.items()
        if flag not in text
    ][:_MOST_FLAGS]


@contextlib.contextmanager
def _without_argument_list() -> Iterator[io.StringIO]:
    """Drop validate_args's printout of all 600 arguments: config.json holds them."""
    sink = io.StringIO()
    with contextlib.redirect_stdout(sink):
        yield sink
    for line in sink.getvalue().splitlines():
        if "WARNING" in line or line.startswith("using world size"):
            print(line, flush=True)
