"""Code shared by ``megasink convert-to-hf`` and ``megasink convert-from-hf``."""

import argparse
from collections.abc import Callable
from pathlib import Path

from megasink.cli.device_flag import add_device, device_problems
from megasink.cli.hub import stay_offline
from megasink.cpu.prepare_process import prepare_quietly
from megasink.errors import UserError
from megasink.files.output_folder import refuse_contents
from megasink.options.command_parser import CommandParser
from megasink.plugins import add_flag


def parser_of(command: str, main: Callable[..., int]) -> CommandParser:
    parser = CommandParser(prog=f"megasink {command}", description=main.__doc__)
    text = (
        "compare logits and generated tokens of both models, or every tensor if memory is "
        "short; default: on"
    )
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "folder to write; must be empty or missing"
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help=text)
    add_device(parser)
    add_flag(parser)
    return parser


def refuse(args: argparse.Namespace) -> None:
    """Refuse an output folder with contents, and a missing device."""
    refuse_contents(args.output)
    if problems := device_problems(args.device):
        raise UserError(problems[0])


def not_verified(folder: Path) -> None:
    print("not verified: --no-verify")


def prepare(device: str | None) -> None:
    """Make Megatron importable, and silence Megatron and transformers."""
    stay_offline()

    prepare_quietly(cpu=device == "cpu")
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "verification needs transformers: install it, or use --no-verify"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
