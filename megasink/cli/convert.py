"""Code shared by ``megasink convert-to-hf`` and ``megasink convert-from-hf``."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from megasink.command_line import CommandParser
from megasink.errors import UserError
from megasink.plugins import add_flag


def parser_of(command: str, main: Callable[..., int]) -> CommandParser:
    parser = CommandParser(prog=f"megasink {command}", description=main.__doc__)
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare logits and generated tokens of both models, or every tensor if memory is "
        "short; default: on",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="verify on the CPU even if there is a GPU"
    )
    add_flag(parser)
    return parser


def not_verified(folder: Path) -> None:
    print("not verified: --no-verify")


def prepare(cpu: bool) -> None:
    """Make Megatron importable, and silence Megatron and transformers."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from megasink.upstream.process import prepare_quietly

    prepare_quietly(cpu=cpu)
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "verification needs transformers: install it, or use --no-verify"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
