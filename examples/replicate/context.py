"""Context extension in small (P1.37, P1.38): a raised RoPE base, then YaRN without training.

For vanilla, sink and gated attention and every seed: train to recall a needle at 64 tokens, train
on at 256 with a RoPE base of 1,000,000, then measure retrieval at 64 to 1024 tokens, as the models
are and with YaRN of factor 4. What is there is not made again.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from examples.replicate.languages import RetrievalLanguage, write_retrieval
from examples.replicate.own_program import OwnProgram
from examples.replicate.record import Run
from examples.replicate.retrieval import retrieval
from examples.steps import Step
from megasink.checkpoints.find import newest_checkpoint
from megasink.cli.demo_runs import AROUND
from megasink.cpu.prepare_process import prepare_quietly
from megasink.figures.run_figure import series
from megasink.figures.run_metrics import read_metrics
from megasink.files.atomic import atomic_text

VARIANTS = ("vanilla", "sink", "gated")
SEEDS = (1, 2, 3)
SHORT, LONG = 64, 256  # tokens
TOKENS = (64, 128, 256, 512, 1024)
FACTOR = 4.0
# One needle: with four pairs, 1500 steps teach which values a document has, but not whose they are.
PAIRS, QUERIES = 1, 6
STEPS, MORE_STEPS = 600, 150
LONG_DOCUMENTS = 1000
SETTINGS: tuple[tuple[str, str, float | None], ...] = (
    (f"trained_at_{SHORT}", "short", None),
    (f"trained_at_{SHORT}_yarn", "short", FACTOR),
    (f"trained_at_{LONG}", "long", None),
    (f"trained_at_{LONG}_yarn", "long", FACTOR),
)
MODEL = f"""
    --device cpu --ranks 1 --num-layers 2 --hidden-size 64 --num-attention-heads 4
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


def runs(out: Path) -> list[Run]:
    """Train and measure what is missing, and return a run per variant and seed.

    Raises:
        UserError: a command failed.
    """
    prepare_quietly(cpu=True)  # before anything imports Megatron
    write_data(out / "data")
    console = Console(highlight=False)
    for seed in SEEDS:
        for variant in VARIANTS:
            for step in steps(out, variant, seed):
                step.run(console)
    return [_run(out, variant, seed) for variant in VARIANTS for seed in SEEDS]


def _run(out: Path, variant: str, seed: int) -> Run:
    rows, curves = measured(out, variant, seed), {}
    for name, stage, yarn in SETTINGS:
        chosen = [row for row in rows if (row["stage"], row["yarn"]) == (stage, yarn)]
        curves[name] = [row["tokens"] for row in chosen], [row["accuracy"] for row in chosen]
    seconds = sum(_seconds(out / f"{variant}-{seed}-{stage}") for stage in ("short", "long"))
    return Run(
        cell=variant,
        seed=seed,
        metrics={
            f"{name}/{tokens}": accuracy
            for name, curve in curves.items()
            for tokens, accuracy in zip(*curve, strict=True)
        },
        curves=curves,
        seconds=seconds,
        cpu_seconds=seconds,  # one thread
    )


def _seconds(run: Path) -> float:
    """Return the time of a run's steps."""
    return float(np.nansum(series(read_metrics(run), "seconds")[1]))


PROGRAM = OwnProgram(
    cells=VARIANTS,
    seeds=SEEDS,
    curves=tuple(name for name, _, _ in SETTINGS),
    metrics=tuple(f"{name}/{tokens}" for name, _, _ in SETTINGS for tokens in TOKENS),
    x="tokens of the document",
    runs=runs,
)
