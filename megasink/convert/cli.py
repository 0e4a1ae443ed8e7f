"""``megasink convert-to-hf`` and ``megasink convert-from-hf``."""

import argparse
import logging
import os
import shlex
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from megasink.command_line import CommandParser, unknown_name
from megasink.convert.targets import BY_NAME
from megasink.errors import UserError
from megasink.json_file import read_object


def to_hf_main(argv: Sequence[str] | None = None) -> int:
    """A checkpoint of a run -> a Hugging Face folder that stock transformers loads.

    Whatever the run's layout was, nothing of it is built: tensors go over one by one. Then the
    folder is loaded with transformers and its logits are compared with Megatron's.
    """
    parser = _parser("convert-to-hf", to_hf_main)
    parser.add_argument("run", type=Path, help="a run folder, or a checkpoint folder in it")
    parser.add_argument("output", type=Path, help="folder to write; must be empty or missing")
    parser.add_argument(
        "--target",
        help=f"architecture: {', '.join(BY_NAME)}; default: the first that is the same model",
    )
    parser.add_argument("--iteration", type=int, help="of the checkpoint; default: the newest")
    parser.add_argument("--tokenizer", type=Path, help="folder; default: the one of the run")
    parser.add_argument("--shard-size", default="5GB", help="of a safetensors file; default: 5GB")
    args = parser.parse_args(argv)
    from megasink.convert.safetensors_writer import parse_size
    from megasink.convert.to_hf import export, source_of

    if args.target is not None and args.target not in BY_NAME:
        raise UserError(unknown_name("--target", args.target, BY_NAME))
    shard_bytes = parse_size(args.shard_size)
    source = source_of(args.run, args.iteration, args.tokenizer)
    if not args.verify:
        target = export(
            source, args.output, args.target, shard_bytes=shard_bytes, verify=_not_verified
        )
    else:
        _prepare(args.cpu)
        from megasink.checkpoint.load import single_process
        from megasink.convert.checking import check_export

        with single_process():
            target = export(
                source,
                args.output,
                args.target,
                shard_bytes=shard_bytes,
                verify=lambda folder: check_export(source, folder, args.target),
            )
    print(f"{args.output}: {target.architecture}, for transformers {target.since} or later")
    return 0


def from_hf_main(argv: Sequence[str] | None = None) -> int:
    """A Hugging Face folder -> a run folder whose checkpoint `megasink train --load` takes.

    The checkpoint fits every layout. A model with plain attention can become one with gates that
    gives the same logits, or one with sinks of a chosen weight, to be fine-tuned.
    """
    parser = _parser("convert-from-hf", from_hf_main)
    parser.add_argument("model", type=Path, help="a Hugging Face folder with safetensors")
    parser.add_argument("output", type=Path, help="run folder to write; must be empty or missing")
    parser.add_argument(
        "--attention-variant",
        choices=("gated", "sink"),
        help="turn a model with plain attention into this; default: leave it as it is",
    )
    parser.add_argument(
        "--gate-granularity",
        choices=("headwise", "elementwise"),
        help="of --attention-variant gated (default: headwise); or of a model whose architecture "
        "has elementwise gates that are equal in every head",
    )
    parser.add_argument(
        "--sink-weight",
        type=float,
        default=0.05,
        help="of --attention-variant sink: the mean attention weight that each head's sink draws; "
        "default: 0.05",
    )
    args = parser.parse_args(argv)
    from megasink.convert.gating import change_of

    if problem := _not_of_transformers(args.model):
        raise UserError(f"{args.model}: {problem}")
    change = change_of(args.attention_variant, args.gate_granularity, args.sink_weight)
    _prepare(args.cpu)
    from megasink.checkpoint.load import single_process
    from megasink.convert.checking import check_import
    from megasink.convert.from_hf import import_model, source_of

    source = source_of(args.model, None if change else args.gate_granularity)
    check: Callable[[Path], None] = _not_verified
    if args.verify or (change is not None and change.sink_weight is not None):
        check = lambda folder: check_import(source, change, folder, compare=args.verify)  # noqa: E731
    with single_process():
        import_model(source, args.output, change, verify=check)
    print(f"train it: {train_line(args.output)}")
    return 0


def train_line(folder: Path) -> str:
    """The command that goes on from an imported model; what is its user's in capitals."""
    flags = shlex.split((folder / "flags.txt").read_text())
    positions = int(flags[flags.index("--max-position-embeddings") + 1])
    return (
        f"megasink train $(cat {folder}/flags.txt) --load {folder}/checkpoints --finetune "
        f"--run-dir RUN --data-path PREFIX --seq-length {min(positions, 2048)} "
        "--micro-batch-size 1 --train-iters STEPS --lr LR"
    )


def _parser(command: str, main: Callable[..., int]) -> argparse.ArgumentParser:
    parser = CommandParser(prog=f"megasink {command}", description=main.__doc__)
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare logits and generated tokens of both sides; without enough memory for that, "
        "every tensor; default: do it",
    )
    parser.add_argument("--cpu", action="store_true", help="verify there although a GPU is there")
    return parser


def _not_of_transformers(folder: Path) -> str | None:
    """Why a folder is none of transformers, before the seconds that the imports take."""
    config = folder / "config.json"
    if not folder.is_dir():
        return "no such folder"
    if not config.is_file():
        return "no folder of transformers (no config.json): nothing is downloaded"
    try:
        arguments = "arguments" in read_object(config)
    except UserError:
        return None  # the import says what is wrong with it
    return "a run of megasink: megasink convert-to-hf writes one out" if arguments else None


def _not_verified(folder: Path) -> None:
    print("not verified: --no-verify")


def _prepare(cpu: bool) -> None:
    """Make Megatron importable, and let it and transformers be silent."""
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from megasink.process import prepare_process

    prepare_process(["--cpu"] if cpu else [])
    try:
        import transformers
    except ImportError as error:
        raise UserError("verifying needs transformers: install it, or use --no-verify") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
