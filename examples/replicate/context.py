"""Context extension in small (P1.37, P1.38): a raised RoPE base, then YaRN without training.

    python examples/replicate/context.py runs/context

For vanilla, sink and gated attention and every seed: train to recall a needle at 64 tokens, train
on at 256 with a RoPE base of 1,000,000, then measure retrieval at 64 to 1024 tokens, as the models
are and with YaRN of factor 4. A killed program goes on where it was. Writes context.json and
context.png. --seeds N takes the first N seeds.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from rich.console import Console
from rich.table import Table

from examples.replicate.languages import RetrievalLanguage, write_retrieval
from examples.replicate.retrieval import retrieval
from megasink.atomic import atomic_text
from megasink.checkpoint.find import newest_checkpoint
from megasink.data.trigger_language import AROUND
from megasink.errors import UserError
from megasink.finetune.steps import Step
from megasink.process import prepare_quietly
from megasink.report.style import PALETTE, label, panels, save, styled

PREDICTION = """
All three retrieve nearly perfectly at the length of their last training, and fall to chance beyond
twice of it as they are. YaRN keeps a part of it at 512 tokens. Sink and gated attention keep more
than vanilla, whose sink on the first token depends on its position; with 3 seeds the difference
will hardly be larger than the spread.
"""
VARIANTS = ("vanilla", "sink", "gated")
SEEDS = (1, 2, 3)
SHORT, LONG = 64, 256  # tokens
TOKENS = (64, 128, 256, 512, 1024)
FACTOR = 4.0
# One needle: with four pairs, 1500 steps teach which values a document has, but not whose they are.
PAIRS, QUERIES = 1, 6
STEPS, MORE_STEPS = 600, 150
LONG_DOCUMENTS = 1000
MODEL = f"""
    --cpu --ranks 1 --num-layers 2 --hidden-size 64 --num-attention-heads 4
    --max-position-embeddings {TOKENS[-1]} --position-embedding-type rope --normalization RMSNorm
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --make-vocab-size-divisible-by 2 --split 98,2,0 --num-workers 0 --head-balance-coeff 0
    --lr-decay-style cosine --lr-warmup-fraction 0.05 --log-interval 50 --eval-iters 4
"""
TRAINED = f"""
    --seq-length {SHORT} --micro-batch-size 16 --global-batch-size 16 --train-iters {STEPS}
    --lr 5e-3 --min-lr 5e-4 --save-interval {STEPS} --eval-interval {STEPS // 4}
"""
EXTENDED = f"""
    --seq-length {LONG} --micro-batch-size 4 --global-batch-size 4 --train-iters {MORE_STEPS}
    --lr 2e-3 --min-lr 2e-4 --save-interval {MORE_STEPS} --eval-interval {MORE_STEPS // 2}
    --rotary-base 1000000 --finetune
"""


def steps(out: Path, variant: str, seed: int) -> Iterator[Step]:
    """Yield both trainings of a variant and seed."""
    short, long = (out / f"{variant}-{seed}-{name}" for name in ("short", "long"))
    data = out / "data"
    own = [*MODEL.split(), "--attention-variant", variant, "--seed", seed]
    own += ["--tokenizer-model", data / "tokenizer", "--resume", "auto"]
    for run, name, flags, count in (
        (short, "short", TRAINED.split(), STEPS),
        (long, "long", [*EXTENDED.split(), "--load", short / "checkpoints"], MORE_STEPS),
    ):
        words = ["train", *own, *flags, "--data-path", data / name, "--run-dir", run]
        checkpoints = run / "checkpoints"
        yield Step(
            f"{variant}, seed {seed}, {name}",
            words,
            lambda checkpoints=checkpoints, count=count: newest_checkpoint(checkpoints) == count,
        )


def write_data(folder: Path) -> None:
    """Write the documents of both lengths, each of which fills a sample."""
    language: dict[str, Any] = {"pairs": PAIRS, "queries": QUERIES}
    for name, tokens, documents in (
        ("short", SHORT, STEPS * 16 + 1000),
        ("long", LONG, LONG_DOCUMENTS),
    ):
        if not (folder / f"{name}.idx").is_file():
            write_retrieval(folder, name, documents=documents, length=tokens - AROUND, **language)


def measured(out: Path, variant: str, seed: int) -> list[dict[str, Any]]:
    """Return a row for each stage, factor and length; read from the file of an earlier call."""
    path = out / f"{variant}-{seed}.json"
    if path.is_file():
        rows: list[dict[str, Any]] = json.loads(path.read_text())
        return rows
    # A BOS and letters: as many tokens as are named, with the answer that is asked for.
    lengths = [tokens - AROUND for tokens in TOKENS]
    language, rows = RetrievalLanguage(), []
    for stage in ("short", "long"):
        for yarn in (None, FACTOR):
            run = out / f"{variant}-{seed}-{stage}"
            found = retrieval(run, language, lengths, yarn=yarn, pairs=PAIRS)
            rows += [
                {"variant": variant, "seed": seed, "stage": stage, "yarn": yarn, "tokens": tokens}
                | asdict(each)
                for tokens, each in zip(TOKENS, found, strict=True)
            ]
    atomic_text(path, json.dumps(rows, indent=1) + "\n")
    return rows


def accuracies(rows: Sequence[dict[str, Any]], **which: Any) -> np.ndarray:
    """Return [seed, length] accuracies of the rows with these values."""
    chosen = [row for row in rows if all(row[key] == value for key, value in which.items())]
    seeds = sorted({row["seed"] for row in chosen})
    return np.array(
        [[r["accuracy"] for r in chosen if r["seed"] == seed] for seed in seeds], dtype=float
    )


SETTINGS: tuple[tuple[str, str, float | None], ...] = (
    (f"trained at {SHORT}", "short", None),
    (f"trained at {SHORT}, YaRN x{FACTOR:g}", "short", FACTOR),
    (f"trained on at {LONG}", "long", None),
    (f"trained on at {LONG}, YaRN x{FACTOR:g}", "long", FACTOR),
)


@styled()
def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy by length: a panel per variant, mean and standard deviation over seeds."""
    figure, axes = panels(1, len(VARIANTS), 3.2)
    for axis, variant in zip(np.ravel(axes), VARIANTS, strict=True):
        for i, (name, stage, yarn) in enumerate(SETTINGS):
            found = accuracies(rows, variant=variant, stage=stage, yarn=yarn)
            spread = found.std(0, ddof=1) if len(found) > 1 else np.zeros(len(TOKENS))
            axis.errorbar(
                TOKENS, found.mean(0), spread, color=PALETTE[i], marker="o", capsize=2, label=name
            )
        chance = 1 / RetrievalLanguage().values
        axis.axhline(chance, color="#6b7280", linestyle=":", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks(TOKENS, [str(tokens) for tokens in TOKENS])
        axis.set_ylim(0, 1.02)
        label(axis, f"{variant} attention", "retrieval accuracy", "tokens of the document")
    np.ravel(axes)[0].legend(fontsize=7)
    save(figure, path)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return accuracy by length, mean ± standard deviation over seeds."""
    made = Table(title="Retrieval accuracy by tokens of the document")
    for name in ("attention", "setting", *map(str, TOKENS)):
        made.add_column(name)
    for variant in VARIANTS:
        for name, stage, yarn in SETTINGS:
            found = accuracies(rows, variant=variant, stage=stage, yarn=yarn)
            cells = [f"{mean:.2f}" for mean in found.mean(0)]
            if len(found) > 1:
                spread = found.std(0, ddof=1)
                cells = [f"{mean} ± {s:.2f}" for mean, s in zip(cells, spread, strict=True)]
            made.add_row(variant, name, *cells)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, measure, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, choices=range(1, len(SEEDS) + 1), default=len(SEEDS))
    args = parser.parse_args(argv)
    console, started = Console(highlight=False), time.process_time()
    seeds = SEEDS[: args.seeds]
    prepare_quietly(cpu=True)  # before anything imports Megatron
    try:
        write_data(args.output / "data")
        for seed in seeds:
            for variant in VARIANTS:
                for step in steps(args.output, variant, seed):
                    step.run(console)
        rows = [
            row for seed in seeds for name in VARIANTS for row in measured(args.output, name, seed)
        ]
    except UserError as error:
        console.print(f"context.py: error: {error}", markup=False)
        return int(getattr(error, "exit_code", 2))
    told = {"prediction": PREDICTION.strip(), "seeds": list(seeds), "rows": rows}
    atomic_text(args.output / "context.json", json.dumps(told, indent=1) + "\n")
    draw(rows, args.output / "context.png")
    console.print(table(rows))
    console.print(f"measured in {time.process_time() - started:.0f} s of CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
