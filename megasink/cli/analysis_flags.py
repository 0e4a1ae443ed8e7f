"""The flags of an analysis, and their checks.

They need no model, and import no torch for what the command line and the file system can tell.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from megasink import cpu
from megasink.analysis.capture.head_names import head_problems, parse_head
from megasink.analysis.model_shape import ModelShape, shape_of
from megasink.analysis.options import (
    BOS,
    DTYPES,
    KEPT,
    SEQ_LENGTH,
    ModelOptions,
    flag_of,
    length_problem,
    model_problem,
    positions_problem,
    too_small,
)
from megasink.attention.definitions import MAP_TOKENS
from megasink.checkpoints.find import find_checkpoint
from megasink.checkpoints.saved_arguments import read_arguments
from megasink.checkpoints.tokenizer import tokenizer_problem
from megasink.command_line import CommandParser
from megasink.data.corpus import STDLIB
from megasink.data.replaced_tokens import FORMS
from megasink.data.replaced_tokens import problems_of as problems_of_replaced
from megasink.data.text_tokenizer import add_parse_special_tokens
from megasink.errors import ConfigError, UserError
from megasink.extras import require_train
from megasink.output_folder import add_overwrite, folder_problem, foreign_contents
from megasink.plugins import add_flag

# Devices of torch that nothing here was tried on.
_UNTRIED = ("mps", "xpu", "npu", "hpu")


def add_sequence_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options of how texts become sequences; see `inputs_of`."""
    parser.add_argument(
        "--seq-length",
        type=int,
        help=f"maximum tokens per sequence (default: {SEQ_LENGTH}, or the model's maximum)",
    )
    parser.add_argument(
        "--random-lengths",
        type=int,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="cut each sequence at a length drawn evenly from LOW to HIGH tokens, by the seed, "
        "in place of --seq-length",
    )
    parser.add_argument(
        "--bos", choices=BOS, default="auto", help="auto follows the tokenizer (default: auto)"
    )
    add_replacement_flags(parser)


def add_replacement_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of replaced tokens (P2.15, P2.16)."""
    parser.add_argument(
        "--replace-tokens-at",
        nargs="+",
        metavar="POSITION",
        help="replace the tokens at these positions of every sequence, from 0, BOS included; "
        f"{KEPT}: keep them (default: as the run was trained)",
    )
    parser.add_argument(
        "--replace-tokens-with",
        metavar="{random,ID}",
        help=f"by random tokens of the vocabulary, or the token with this id ({FORMS})",
    )


def replacement_problems(args: argparse.Namespace) -> list[str]:
    """Return the problems with the options, one message each."""
    at, value = args.replace_tokens_at, args.replace_tokens_with
    if at == [KEPT]:
        return [f"--replace-tokens-with {value} with --replace-tokens-at {KEPT}"] if value else []
    wrong = [word for word in at or [] if not word.removeprefix("-").isdecimal()]
    if wrong:
        return [f"--replace-tokens-at {' '.join(wrong)}: give positions from 0 on, or {KEPT} alone"]
    return problems_of_replaced([int(word) for word in at or ()], value)


def weights_parser(prog: str, description: str | None) -> CommandParser:
    """Return a parser with the options of how a model is loaded, and the output folder."""
    parser = CommandParser(prog=prog, description=description)
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="Hugging Face model folder, or a run"
    )
    parser.add_argument("--output", type=Path, required=True, help="output folder")
    add_overwrite(parser)
    parser.add_argument("--name", help="model name in tables and figures (default: the folder's)")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer folder (default: MODEL)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: the model's")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    parser.add_argument(
        "--attn-implementation", choices=("sdpa", "eager"), help="default: the model's own"
    )
    add_parse_special_tokens(parser)
    parser.add_argument(
        "--yarn",
        type=float,
        metavar="FACTOR",
        help="stretch the context of a run that has rotary embeddings by YaRN, without training",
    )
    add_flag(parser)
    return parser


def model_parser(prog: str, description: str | None) -> CommandParser:
    """Return a parser with the model, text and device options."""
    parser = weights_parser(prog, description)
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="text, .jsonl(.gz, .zst) or .parquet files, or folders; each one is a dataset",
    )
    parser.add_argument("--json-key", default="text", help="JSON key of the text (default: text)")
    parser.add_argument(
        "--max-samples", type=int, default=100, help="sequences per dataset (default: 100)"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="batch size (default: 8)")
    parser.add_argument("--seed", type=int, default=1234, help="of random tokens (default: 1234)")
    return parser


def settled(args: argparse.Namespace, problems: Sequence[str]) -> ModelOptions:
    """Refuse a command line with problems; otherwise return how its model is loaded.

    Raises:
        ConfigError: one message with every problem.
    """
    if problems:
        raise ConfigError(problems)
    device = args.device
    if device is None:
        device = "cuda" if cpu.cuda_present() else "cpu"
    return ModelOptions.of(args, device=device)


def weights_problems(args: argparse.Namespace, *, is_run: bool) -> list[str]:
    """Return the problems with the options of `weights_parser`.

    Args:
        is_run: MODEL is a megasink run, which is known to exist.
    """
    problems = []
    if is_run and args.attn_implementation is not None:
        problems.append("--attn-implementation applies to Hugging Face models only: remove it")
    if is_run and args.dtype != "auto":
        problems.append("--dtype applies to Hugging Face models only: a run keeps its own")
    if not is_run and args.yarn is not None:
        problems.append(
            "--yarn applies to runs only: set rope_parameters in the model's config.json"
        )
    elif args.yarn is not None and not 1 < args.yarn < math.inf:
        problems.append(f"--yarn {args.yarn:g}: a factor of more than 1")
    if is_run:
        try:
            require_train(f"{args.model} is a run, which")
            read_arguments(find_checkpoint(args.model).config)
        except UserError as error:
            problems.append(str(error))
    if not is_run and (problem := model_problem(args.model)):
        problems.append(problem)
    if args.tokenizer is not None and (problem := tokenizer_problem(args.tokenizer)):
        problems.append(f"--tokenizer {problem}")
    if problem := folder_problem(args.output):
        problems.append(f"--output {args.output} {problem}")
    elif not args.overwrite and (problem := foreign_contents(args.output)):
        problems.append(problem)
    if args.device is not None and (problem := _device_problem(args.device)):
        problems.append(f"--device {args.device}: {problem}")
    return problems


def problems_of(args: argparse.Namespace, *, is_run: bool) -> list[str]:
    """Return the problems with the options.

    Args:
        is_run: as in `weights_problems`.
    """
    problems = weights_problems(args, is_run=is_run)
    if "natural" in args.inputs and not args.data:
        problems.append("no --data: pass text files or folders")
    if "natural" not in args.inputs and args.data:
        problems.append("--data requires --inputs natural: add it")
    problems += [
        f"--data {path}: no such file or folder"
        for path in args.data
        if path != STDLIB and not Path(path).exists()
    ]
    problems += too_small(args, flag_of)
    problems += replacement_problems(args)
    shape = known_shape(args)
    problems += filter(
        None,
        (
            length_problem(args.random_lengths, args.seq_length),
            positions_problem(args, shape.positions, Path(args.model).name),
        ),
    )
    return problems + map_problems(args.maps or [], args.map_length, shape.heads)


def known_shape(args: argparse.Namespace) -> ModelShape:
    """Return the shape of MODEL as far as its config.json tells; `weights_problems` says the rest.

    A stretched context (--yarn) has no known number of positions.
    """
    try:
        shape = shape_of(args.model)
    except (UserError, OSError):
        return ModelShape(None, None)
    return shape if args.yarn is None else shape._replace(positions=None)


def map_problems(
    heads: Sequence[str], length: int, model: Sequence[int] | None = None
) -> list[str]:
    """Return the problems with `--maps` and `--map-length` that need no model to find."""
    problems = []
    if not 2 <= length < MAP_TOKENS:
        problems.append(f"--map-length {length}: must be 2 to {MAP_TOKENS - 1}, as maps are S x S")
    for text in heads:
        try:
            chosen = parse_head(text)
            if model:
                problems += [f"--maps: {one}" for one in head_problems([chosen], model)]
        except ValueError as error:
            problems.append(f"--maps {error}")
    return problems


def _device_problem(name: str) -> str | None:
    """Return why there is no such device here; imports torch where there may be a GPU."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", *_UNTRIED) or (":" in name and not index.isdecimal()):
        return "no such device: use cpu or cuda"
    if kind != "cuda":
        return None
    there = 0
    if cpu.cuda_present():
        import torch

        there = torch.cuda.device_count()
    if int(index or 0) >= there:
        return f"this machine has {there or 'no'} CUDA devices: use {'cuda:0' if there else 'cpu'}"
    return None
