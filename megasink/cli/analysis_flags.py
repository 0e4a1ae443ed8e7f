"""The flags of an analysis, and their checks, which need no model and no torch."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megasink import cpu
from megasink.analysis.heads import head_problems, parse_head
from megasink.analysis.options import KEPT, AnalysisOptions, ModelOptions, model_problem
from megasink.attention.constants import MAP_TOKENS
from megasink.checkpoints.find import find_checkpoint, is_run
from megasink.checkpoints.run_tokenizer import tokenizer_problem
from megasink.checkpoints.saved_arguments import read_arguments
from megasink.cli import hub
from megasink.cli.device_flag import add_device, device_problems
from megasink.data.replaced_tokens import problems_of as problems_of_replaced
from megasink.data.text_tokenizer import add_parse_special_tokens
from megasink.errors import ConfigError, UserError
from megasink.files import output_folder
from megasink.files.json_file import read_object
from megasink.files.output_folder import add_overwrite, folder_problem, foreign_contents
from megasink.megatron.hybrid_pattern import blocks_of, with_heads
from megasink.options.command_parser import CommandParser
from megasink.options.dataclass_flags import add_fields
from megasink.options.extras import require_train
from megasink.plugins import add_flag

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_POSITIONS = ("max_position_embeddings", "n_positions")


class ModelShape(NamedTuple):
    """The sizes in a config.json; None for missing ones."""

    heads: list[int] | None  # most query heads in each layer
    positions: int | None  # most tokens of a sequence


def shape_of(folder: Path) -> ModelShape:
    """Return the shape of a Hugging Face model, or of the newest checkpoint of a run."""
    if is_run(folder):
        config: Mapping[str, Any] = read_arguments(find_checkpoint(folder).config)
        if pattern := config.get("hybrid_layer_pattern"):
            own, heads = with_heads(pattern), config["num_attention_heads"]
            by_block = [heads if block in own else 0 for block in range(len(blocks_of(pattern)))]
            return ModelShape(by_block, _number(config, _POSITIONS))
    else:
        config = read_object(folder / "config.json")
        text = config.get("text_config")
        config = text if isinstance(text, dict) else config
    layers, heads = _number(config, _LAYERS), _number(config, _HEADS)
    known = [heads] * layers if heads and layers and layers < 10_000 else None
    return ModelShape(known, _number(config, _POSITIONS))


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((n for name in names if type(n := config.get(name)) is int and n > 0), None)


REPLACEMENT = ("replace_tokens_at", "replace_tokens_with")
SEQUENCE = ("seq_length", "random_lengths", "bos", *REPLACEMENT)
"""Options for turning texts into sequences; see `inputs_of`."""


def replacement_problems(options: AnalysisOptions) -> list[str]:
    """Return the problems with the tokens to replace, one message each."""
    at, value = options.replace_tokens_at, options.replace_tokens_with
    if at == (KEPT,):
        both = f"--replace-tokens-with {value} and --replace-tokens-at {KEPT} cannot be combined"
        return [f"{both}: drop one"] if value else []
    wrong = [word for word in at or [] if not word.removeprefix("-").isdecimal()]
    if wrong:
        return [f"--replace-tokens-at {' '.join(wrong)}: use 0 or more, or {KEPT} alone"]
    return problems_of_replaced([int(word) for word in at or ()], value)


def weights_parser(prog: str, description: str | None, download: str = "") -> CommandParser:
    """Return a parser with the options for loading a model, and the output folder."""
    parser = CommandParser(prog=prog, description=description)
    parser.add_argument("model", type=Path, metavar="MODEL", help="Hugging Face folder, or a run")
    parser.add_argument("--output", type=Path, required=True, help="output folder")
    add_overwrite(parser)
    add_fields(parser, ModelOptions, "name", "tokenizer", "dtype", "attn_implementation", "yarn")
    add_device(parser)
    add_parse_special_tokens(parser)
    add_flag(parser)
    hub.add_allow_download(parser, download)
    return parser


def model_parser(
    prog: str,
    description: str | None,
    options: type[AnalysisOptions],
    *names: str,
    download: str = "",
) -> CommandParser:
    """Return a parser with the model, text and device options, and some fields of a record."""
    parser = weights_parser(prog, description, download)
    common = ("data", "json_key", "max_samples", "batch_size", "seed")
    add_fields(parser, options, *common, *names)
    return parser


def settled(args: argparse.Namespace, problems: Sequence[str]) -> ModelOptions:
    """Refuse a command line with problems; otherwise return the loading options."""
    if problems:
        raise ConfigError(problems)
    if hub.waits_for_download(args):
        args.name = args.name or args.model.name
        args.model = hub.fetched(args)
    device = args.device
    if device is None:
        device = "cuda" if cpu.cuda_present() else "cpu"
    return ModelOptions.of(args, device=device)


def refuse_others(command: str, which: ModelOptions, options: AnalysisOptions) -> None:
    """Refuse an output folder with results of another command line."""
    if not options.overwrite:
        given = options.given() | {"--name": which.shown_name}
        output_folder.refuse_others(Path(options.output or ""), command, given, options.grows)


def weights_problems(args: argparse.Namespace, *, is_run: bool) -> list[str]:
    """Return the problems with the options of `weights_parser`."""
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
        problems.append(f"--yarn {args.yarn:g}: use a factor above 1")
    if is_run:
        try:
            require_train(f"{args.model} is a run, which")
            read_arguments(find_checkpoint(args.model).config)
        except UserError as error:
            problems.append(str(error))
    problem = model_problem(args.model, "--allow-download")
    if not is_run and problem and not hub.waits_for_download(args):
        problems.append(problem)
    if args.tokenizer is not None and (problem := tokenizer_problem(args.tokenizer)):
        problems.append(f"--tokenizer {problem}")
    if problem := folder_problem(args.output):
        problems.append(f"--output {args.output} {problem}")
    elif not args.overwrite and (problem := foreign_contents(args.output)):
        problems.append(problem)
    return problems + device_problems(args.device)


def problems_of(args: argparse.Namespace, options: AnalysisOptions, *, is_run: bool) -> list[str]:
    """Return the problems with the options."""
    problems = weights_problems(args, is_run=is_run)
    if "natural" in options.inputs and not options.data:
        problems.append("no --data: pass text files or folders")
    if "natural" not in options.inputs and options.data:
        problems.append("--data requires --inputs natural: add natural, or drop --data")
    problems += [
        f"--data {path}: no such file or folder" for path in options.data if not Path(path).exists()
    ]
    problems += options.problems()
    problems += replacement_problems(options)
    shape = known_shape(args)
    if problem := options.positions_problem(shape.positions, Path(args.model).name):
        problems.append(problem)
    return problems + map_problems(options.maps or (), options.map_length, shape.heads)


def known_shape(args: argparse.Namespace) -> ModelShape:
    """Return the shape of MODEL; with --yarn the number of positions is not known."""
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
        problems.append(f"--map-length {length}: use 2 to {MAP_TOKENS - 1}, as maps are S x S")
    for text in heads:
        try:
            chosen = parse_head(text)
            if model:
                problems += [f"--maps: {one}" for one in head_problems([chosen], model)]
        except ValueError as error:
            problems.append(f"--maps {error}")
    return problems
