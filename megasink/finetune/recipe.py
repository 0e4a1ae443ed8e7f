"""What `megasink finetune` runs, step by step, with the papers' settings (P0.15, P0.16, P0.23).

Shapes: L layers, H query heads.
"""

import json
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from megasink.analysis.folder import Analysis, read_analysis
from megasink.analysis.pages.heatmap import importance_pictures
from megasink.atomic import atomic_file, atomic_text
from megasink.balance.shared_heads import choose_shared_heads
from megasink.checkpoints.find import newest_checkpoint
from megasink.data.bins import best_fit
from megasink.data.index import read_sequences, sequence_lengths
from megasink.data.tokenizer import load_tokenizer
from megasink.errors import UserError
from megasink.finetune.settings import AUTO
from megasink.finetune.steps import Step
from megasink.training.flag_file import refused

SAMPLES = 64
"""Held-out conversations on which head importance is measured."""
_HELD_OUT = 0.02  # share of the conversations, the last ones
_SCHEDULE = "--lr-decay-style cosine --lr-warmup-fraction 0.03 --min-lr 0 --weight-decay 0"


def recipe(args: Namespace, further: Sequence[str], console: Console) -> Iterator[Step]:
    """Yield the steps; each is made from what the ones before have written.

    Args:
        further: flags for `megasink train`.
    """
    out, base, run = args.output, args.output / "base", args.output / "run"
    prefix, texts = out / "data" / "chat", out / "data" / "sample.jsonl"
    tokens = ["data", *args.data, "--chat", "--tokenizer", args.model, "--overwrite"]
    tokens += ["--seq-length", args.seq_length, "--output", prefix]
    yield Step("1. conversations -> tokens", tokens, prefix.with_suffix(".json").is_file)
    plugins = [word for name in args.plugin or [] for word in ("--plugin", name)]
    flags = base / "flags.txt"
    imported = ["convert-from-hf", args.model, base, *plugins]
    yield Step("2. a run to start from", imported, flags.is_file, makes=base)
    if not texts.is_file():
        _write_sample(prefix, base / "tokenizer", texts)
    yield _analysis(args, "3. the heads before", base, texts, out / "before", plugins)
    shared = _shared_heads(args, console)
    steps = _steps(args, prefix)
    model = shlex.split(flags.read_text())
    if unsafe := refused(model):
        raise UserError(f"{flags}: {', '.join(unsafe.values())} is of no conversion: delete {base}")
    train = ["train", *model, *_flags(args, base, prefix, shared, steps)]
    yield Step(
        f"4. {steps} steps of training",
        [*train, *plugins, *further],
        lambda: newest_checkpoint(run / "checkpoints") == steps,
    )
    exported = _exported(args)
    export = ["convert-to-hf", run, exported, *(["--adapter"] if args.adapter else []), *plugins]
    yield Step("5. export", export, (exported / "README.md").is_file, makes=exported)
    yield _analysis(args, "6. the heads after", run, texts, out / "after", plugins)


def _exported(args: Namespace) -> Path:
    folder: Path = args.output / ("adapter" if args.adapter else "model")
    return folder


def _analysis(
    args: Namespace, what: str, run: Path, texts: Path, output: Path, plugins: list[str]
) -> Step:
    # The rendered conversations already hold what the template begins with.
    words: list[str | Path | int] = [
        "analyze",
        run,
        "--data",
        texts,
        "--output",
        output,
        "--bos",
        "none",
        "--parse-special-tokens",
        "--no-loss",
    ]
    words += ["--max-samples", SAMPLES, "--seq-length", args.seq_length, "--name", output.name]
    words += plugins
    return Step(what, words, (output / "results.json").is_file)


def _write_sample(prefix: Path, tokenizer_folder: Path, texts: Path) -> None:
    """Write the first held-out conversations as they are rendered; of a few, the last ones."""
    lengths = _lengths(prefix)
    first = min(_trained(lengths), max(0, len(lengths) - SAMPLES))
    tokenizer = load_tokenizer(tokenizer_folder)
    rows = read_sequences(str(prefix), range(first, min(first + SAMPLES, len(lengths))))
    lines = [json.dumps({"text": tokenizer.decode(row)}) for row in rows]
    atomic_text(texts, "\n".join(lines) + "\n")


def _shared_heads(args: Namespace, console: Console) -> int:
    """Return m of Eq. 8, and print the heads that it shares."""
    if args.shared_heads != AUTO:
        return int(args.shared_heads)
    chosen = choose_shared_heads(_importance(read_analysis(args.output / "before")))
    console.print(escape(chosen.describe()), soft_wrap=True)
    return chosen.m


def _importance(analysis: Analysis) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return analysis.values("importance")


def _lengths(prefix: Path) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    lengths = sequence_lengths(str(prefix))
    if lengths is None:
        raise UserError(f"{prefix}.idx is damaged: delete {prefix.parent}, and repeat the command")
    return lengths


def _trained(lengths: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
    """Return the number of conversations to train on, the first ones."""
    return len(lengths) - max(1, round(_HELD_OUT * len(lengths)))


def _steps(args: Namespace, prefix: Path) -> int:
    """Return the steps of so many epochs of packed samples."""
    lengths = _lengths(prefix)
    if len(lengths) < 2:
        raise UserError(f"--data {' '.join(args.data)}: one conversation is held out, give more")
    places = lengths[: _trained(lengths)].astype(np.int64) - 1
    samples = len(best_fit(places, args.seq_length))
    return max(1, round(args.epochs * samples / args.global_batch_size))


def _flags(args: Namespace, base: Path, prefix: Path, shared: int, steps: int) -> list[str | Path]:
    """Return the flags of `megasink train`, beside those of the model."""
    lengths = _lengths(prefix)
    trained = _trained(lengths)
    flags: list[str | Path] = ["--run-dir", args.output / "run", "--resume", "auto"]
    flags += ["--pretrained-checkpoint", base / "checkpoints", "--data-path", prefix]
    flags += ["--split", f"{trained},{len(lengths) - trained},0", *_SCHEDULE.split()]
    for name in ("seq_length", "micro_batch_size", "global_batch_size", "lr", "head_balance_coeff"):
        flags += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    flags += ["--head-balance-shared-heads", str(shared), "--train-iters", str(steps)]
    flags += ["--eval-interval", str(max(1, steps // 4)), "--eval-iters", "1"]
    if not args.full:
        # TransformerEngine's fused norm hides the input of A.
        flags += ["--lora-rank", str(args.lora_rank), "--transformer-impl", "local"]
    return [*flags, *([] if args.ranks is None else ["--ranks", str(args.ranks)])]


def summary(args: Namespace) -> Iterator[str]:
    """Draw importance.png, and yield what was made."""
    before, after = (read_analysis(args.output / name) for name in ("before", "after"))
    picture = args.output / "importance.png"
    with atomic_file(picture) as file:
        file.write(importance_pictures([(a.name, _importance(a)) for a in (before, after)]))
    imbalance = [float(np.nanmean(a.values("imbalance"))) for a in (before, after)]
    for what, value in (
        ("head imbalance", f"{imbalance[0]:.4f} -> {imbalance[1]:.4f}"),
        ("picture", picture),
        ("curves", args.output / "run" / "curves.png"),
        ("the heads", f"megasink report {args.output / 'before'} {args.output / 'after'}"),
        ("exported", _exported(args)),
    ):
        yield f"  {what:15} {value}"
