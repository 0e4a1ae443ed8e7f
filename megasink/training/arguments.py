"""Parse a command line into Megatron's and megasink's arguments; report all problems at once."""

import contextlib
import io
import os
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megasink.errors import ConfigError
from megasink.megatron.arguments import parse_known
from megasink.training import checks, run_dir
from megasink.training.checks.gates import match_ffn_width
from megasink.training.checks.schedule import set_decay
from megasink.training.checks.transformer_layer import set_gated_unit
from megasink.training.checks.vocabulary import pin_vocabulary


def parse(argv: Sequence[str], *, checked: bool = False) -> tuple[Namespace, dict[str, Any]]:
    """Parse and validate a command line.

    Args:
        argv: flags without the program name.
        checked: whether `early.refuse` has found nothing in it; then only what depends on this
            process and its device is checked.

    Returns:
        the namespace, with ``padded_vocab_size`` pinned to the tokenizer, and the arguments that
        identify the run, as given (Megatron derives some of them).

    Raises:
        ConfigError: lists every problem, before anything is built.
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
    pin_vocabulary(args)
    set_gated_unit(args)
    set_decay(args)
    with _without_argument_list(), refusals_of_megatron():
        arguments.validate_args(args)
    if args.match_ffn_width:
        match_ffn_width(args)
    # Megatron sets it in the loop that --skip-train leaves out.
    args.curr_iteration = 0
    return args, identity


@contextlib.contextmanager
def refusals_of_megatron() -> Iterator[None]:
    """Convert any error that Megatron raises while it validates flags.

    Raises:
        ConfigError: with Megatron's message.
    """
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError([f"Megatron refuses this configuration: {_text(error)}"]) from error


def _text(error: BaseException) -> str:
    """Return the message on one line, or the source line of a bare assertion."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}: {last.line}"
    return " ".join(str(error).split()) or place


@contextlib.contextmanager
def _without_argument_list() -> Iterator[None]:
    """Drop validate_args's printout of all 600 arguments: config.json holds them."""
    sink = io.StringIO()
    with contextlib.redirect_stdout(sink):
        yield
    for line in sink.getvalue().splitlines():
        if "WARNING" in line or line.startswith("using world size"):
            print(line, flush=True)
