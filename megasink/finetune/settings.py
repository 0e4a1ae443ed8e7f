"""The command line of `megasink finetune`, and what a finished step depends on."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasink.atomic import atomic_text
from megasink.command_line import CommandParser, Reading
from megasink.errors import ConfigError, UserError
from megasink.json_file import read_object
from megasink.plugins import add_flag

AUTO = "auto"
LEARNING_RATES = {True: 1e-4, False: 1e-5}
"""With LoRA or without; the paper states none (P0.23)."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser; what it does not know goes to `megasink train`."""
    found = CommandParser(
        prog="megasink finetune",
        description=description,
        usage="megasink finetune MODEL --data FILE... --output FOLDER [FLAGS OF megasink train]",
    )
    add = found.add_argument
    add("model", type=Path, metavar="MODEL", help="a Hugging Face folder with safetensors")
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="conversations: JSON lines or parquet with messages, as `megasink data --chat` reads",
    )
    add("--output", type=Path, required=True, help="folder of all that is made")
    add("--full", action="store_true", help="train all weights, not LoRA adapters")
    add("--lora-rank", type=int, default=16, help="default: 16 (P0.23)")
    add("--adapter", action="store_true", help="export the adapter for peft, not a merged model")
    add("--head-balance-coeff", type=float, default=1e-2, help="lambda of Eq. 8; default: 1e-2")
    add(
        "--shared-heads",
        default=AUTO,
        metavar="M",
        help="m of Eq. 8, the heads of each layer that stay out of the loss; 0 balances all of "
        f"them (Eq. 7); default: {AUTO}, by the importance of the model's heads",
    )
    add("--seq-length", type=int, default=2048, help="tokens of a packed sample; default: 2048")
    add("--epochs", type=float, default=1.0, help="passes over the conversations; default: 1")
    add("--lr", type=float, help="peak learning rate; default: 1e-4 for LoRA, else 1e-5")
    add("--micro-batch-size", type=int, default=1, help="default: 1")
    add("--global-batch-size", type=int, default=16, help="packed samples per step; default: 16")
    add("--ranks", type=int, help="processes to start; default: as `megasink train`")
    add_flag(found)
    return found


def read(argv: list[str], description: str | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments, and the flags for `megasink train`.

    Raises:
        ConfigError: one sentence for each problem that is known before anything runs.
    """
    reading = Reading(parser(description), argv)
    args, further = reading.namespace, reading.unknown
    problems = list(reading.problems)
    if not problems:
        problems = list(_problems(args))
    if problems:
        raise ConfigError(problems)
    if args.lr is None:
        args.lr = LEARNING_RATES[not args.full]
    return args, further


def _problems(args: argparse.Namespace) -> Iterator[str]:
    config = args.model / "config.json"
    if not config.is_file():
        yield f"{args.model} is not a transformers folder (no config.json; nothing is downloaded)"
    elif (heads := _heads(config)) and args.shared_heads.isdecimal():
        yield from _too_many_shared(int(args.shared_heads), heads)
    if args.shared_heads != AUTO and not args.shared_heads.isdecimal():
        yield f"--shared-heads {args.shared_heads}: a whole number from 0 on, or {AUTO}"
    for path in args.data:
        if not Path(path).exists():
            yield f"--data {path}: no such file"
    if args.full and args.adapter:
        yield "--adapter exports what LoRA trained: drop it, or drop --full"
    if not args.full and args.lora_rank < 1:
        yield f"--lora-rank {args.lora_rank}: use 1 or more, or --full for no LoRA"
    if not args.epochs > 0:
        yield f"--epochs {args.epochs:g}: a number above 0"
    if args.head_balance_coeff < 0:
        yield f"--head-balance-coeff {args.head_balance_coeff:g}: a number from 0 on"
    for flag in ("seq_length", "micro_batch_size", "global_batch_size"):
        if getattr(args, flag) < 1:
            yield f"--{flag.replace('_', '-')} {getattr(args, flag)}: use 1 or more"


def _too_many_shared(shared: int, heads: int) -> Iterator[str]:
    if shared > heads - 2:
        yield (
            f"--shared-heads {shared}: the layers have {heads} heads, and at least two must be "
            "left to balance"
        )


def _heads(config: Path) -> int | None:
    """Return the number of query heads that config.json states; None if it states none."""
    try:
        found = read_object(config)
    except UserError:
        return None  # the conversion reports the problem
    heads = found.get("text_config", found).get("num_attention_heads")
    return heads if isinstance(heads, int) else None


def remember(args: argparse.Namespace, further: list[str], kept: Path) -> None:
    """Keep the settings of the first start, so that a repeated command goes on from its steps.

    Raises:
        UserError: the folder was made with other settings, or cannot be written.
    """
    given = {name: value for name, value in vars(args).items() if name not in ("output", "ranks")}
    now: dict[str, Any] = json.loads(json.dumps(given | {"train": further}, default=str))
    if kept.is_file():
        before = read_object(kept)
        other = [
            f"{name} {before.get(name)} -> {value}"
            for name, value in now.items()
            if before.get(name) != value
        ]
        if other:
            raise UserError(
                f"{kept.parent} holds a fine-tuning with other settings ({'; '.join(other)}): "
                "repeat its command, or choose another --output"
            )
        return
    if kept.parent.is_dir() and any(kept.parent.iterdir()):
        raise UserError(f"{kept.parent} is not empty, and holds no fine-tuning: choose another")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_text(kept, json.dumps(now, indent=1))
    except OSError as error:
        raise UserError(f"{kept.parent} cannot be written ({error.strerror})") from error
