"""``megasink convert-to-hf``: convert a checkpoint to a Hugging Face folder."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megasink.checkpoints.find import find_checkpoint
from megasink.checkpoints.saved_arguments import read_arguments
from megasink.cli import hub
from megasink.cli.convert_shared import not_verified, parser_of, prepare, refuse
from megasink.console.printable import say_next
from megasink.convert.targets import named
from megasink.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a checkpoint of a run to a Hugging Face folder that stock transformers loads.

    Tensors are converted one by one for any parallel layout, without building the model. Then
    transformers loads the folder, and its logits are compared with Megatron's.
    """
    parser = parser_of("convert-to-hf", main)
    text = "a run folder, or a checkpoint folder in it"
    parser.add_argument("run", type=Path, metavar="RUN", help=text)
    parser.add_argument(
        "--target",
        help="architecture, such as llama (an unknown name lists all); default: the first that "
        "fits the model",
    )
    parser.add_argument("--iteration", type=int, help="checkpoint to convert; default: the newest")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer folder; default: the run's")
    parser.add_argument(
        "--shard-size", default="5GB", help="maximum size of a safetensors file; default: 5GB"
    )
    parser.add_argument("--push", metavar="REPO", help="also upload to the Hugging Face hub")
    args = parser.first_screen("megasink convert-to-hf runs/mine --output exported").parse_args(
        argv
    )
    # Before the slow imports; a name costs one second of them.
    if args.target is not None:
        named(args.target)
    refuse(args)
    if args.push and not args.verify:
        raise UserError("--push uploads only verified exports: drop --no-verify")
    shard_bytes = _size(args.shard_size)
    read_arguments(find_checkpoint(args.run, args.iteration).config)
    if args.push:
        hub.refuse_push(args.push)
    from megasink.convert.to_hf import export, source_of

    source = source_of(args.run, args.iteration, args.tokenizer, args.target)
    convert = partial(export, source, args.output, shard_bytes=shard_bytes)
    if not args.verify:
        target = convert(verify=not_verified)
    else:
        prepare(args.device)
        from megasink.checkpoints.load import single_process
        from megasink.convert.choose_verification import check_export

        with single_process():
            target = convert(verify=lambda folder: check_export(source, folder))
    print(f"{args.output}: {target.architecture}, for transformers {target.since} or later")
    print(*(f"warning: {line}\n" for line in target.misread(source.model)), sep="", end="")
    if args.push:
        hub.push(args.output, args.push)
    say_next("analyze its heads", "analyze", args.output, "--data", "TEXTS", "--output", "look")
    return 0


def _size(text: str) -> int:
    """Return the bytes in "5GB", "500MB" or a plain number."""
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9}
    number, unit = text[:-2], units.get(text[-2:].upper())
    try:
        size = int(float(number) * unit if unit else float(text))
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise UserError(f"--shard-size {text}: use a size such as 5GB or 500MB")
    return size
