"""``megasink convert-from-hf``: convert a Hugging Face folder to a run to continue from."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from megasink.attention.variants import variants
from megasink.cli import hub
from megasink.cli.convert_shared import not_verified, parser_of, prepare, refuse
from megasink.convert.attention_change import change_of
from megasink.errors import UserError
from megasink.files.json_file import read_object
from megasink.files.system_errors import missing_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a Hugging Face folder to a run folder that `megasink train --load` takes.

    The checkpoint fits every parallel layout. For fine-tuning, a model with plain attention can be
    converted to one with gates and the same logits, or to one with sinks of a chosen weight.
    """
    parser = parser_of("convert-from-hf", main)
    text = "a Hugging Face folder with safetensors"
    parser.add_argument("model", type=Path, metavar="MODEL", help=text)
    parser.add_argument(
        "--attention-variant",
        choices=[record.name for record in variants() if record.export and record.export.start],
        help="convert a model with plain attention to this variant; default: keep it unchanged",
    )
    text = (
        "for --attention-variant gated (default: headwise), or for a model with elementwise "
        "gates that are equal within every head"
    )
    parser.add_argument("--gate-granularity", choices=("headwise", "elementwise"), help=text)
    text = "for --attention-variant sink: mean attention weight of a head's sink; default: 0.05"
    parser.add_argument("--sink-weight", type=float, default=0.05, help=text)
    hub.add_allow_download(parser)
    args = parser.first_screen(
        "megasink convert-from-hf path/to/llama --output runs/started"
    ).parse_args(argv)
    args.model = hub.fetched(args)
    if problem := _not_of_transformers(args.model):
        raise UserError(f"{args.model}: {problem}")
    refuse(args)

    change = change_of(args.attention_variant, args.gate_granularity, args.sink_weight)
    prepare(args.device)
    from megasink.checkpoints.load import single_process
    from megasink.convert.choose_verification import check_import
    from megasink.convert.from_hf import import_model, source_of

    source = source_of(args.model, None if change else args.gate_granularity)
    check: Callable[[Path], None] = not_verified
    if args.verify or (change is not None and change.sink_weight is not None):
        check = lambda folder: check_import(source, change, folder, compare=args.verify)  # noqa: E731
    with single_process():
        import_model(source, args.output, change, verify=check)
    print(f"train it with: {train_line(args.output)}")
    return 0


def train_line(folder: Path) -> str:
    """Return the command that continues from an imported model, with placeholders in capitals."""
    flags = shlex.split((folder / "flags.txt").read_text())
    positions = int(flags[flags.index("--max-position-embeddings") + 1])
    return (
        f"megasink train $(cat {folder}/flags.txt) --load {folder}/checkpoints --finetune "
        f"--run-dir RUN --data-path PREFIX --seq-length {min(positions, 2048)} "
        "--micro-batch-size 1 --train-iters STEPS --lr LR"
    )


def _not_of_transformers(folder: Path) -> str | None:
    """Return why a folder is not a Hugging Face model, before the slow imports."""
    config = folder / "config.json"
    if not folder.is_dir():
        return missing_folder(folder, "--allow-download").removeprefix(f"{folder}: ")
    if (folder / "adapter_config.json").is_file():
        return "this is a peft adapter: merge it first (merge_and_unload, docs/finetuning.md)"
    if not config.is_file():
        return "not a transformers folder: it has no config.json"
    try:
        arguments = "arguments" in read_object(config)
    except UserError:
        return None  # the conversion reports the problem
    return "a megasink run: use megasink convert-to-hf to export it" if arguments else None
