"""How the one-step lag of the scope `global` compares with the synchronous form of the loss.

`global` takes the gradient of the balance loss at the importance of the step before. On one rank
with one microbatch the scope `data-parallel` is the same loss without that lag. Both train the same
small model from the same seed on the same text (the source of Python's standard library), beside
one without the loss; the picture has the curves, the table how they end and how far they are apart.

    python benchmarks/balance_lag.py --output docs/balance_lag.png
"""

import argparse
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

from megasink.analysis.pages.comparison_page import draw_comparison
from megasink.cli import data as data_command
from megasink.figures.run_figure import series
from megasink.figures.run_metrics import read_metrics
from megasink.figures.style import save
from megasink.training.launch import launch

VOCABULARY = 2048
FLAGS = """
    --num-layers 4 --hidden-size 128 --num-attention-heads 8
    --seq-length 128 --max-position-embeddings 128
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --micro-batch-size 8 --global-batch-size 8
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20
    --attention-variant sink --split 95,5,0 --eval-interval 50 --eval-iters 8 --log-interval 10
"""
LAGS, SYNCHRONOUS, NONE = "global (one step late)", "synchronous", "no loss"


def runs_of(coeff: float) -> dict[str, list[str]]:
    """{name: flags}."""
    weight = ["--head-balance-coeff", str(coeff), "--head-balance-scope"]
    return {
        LAGS: [*weight, "global"],
        SYNCHRONOUS: [*weight, "data-parallel"],
        NONE: ["--head-balance-coeff", "0"],
    }


def text(folder: Path) -> Path:
    """Tokens of the standard library, made once."""
    prefix = folder / "stdlib"
    if not prefix.with_suffix(".json").is_file():
        parser = argparse.ArgumentParser()
        data_command.add_arguments(parser)
        flags = [
            sysconfig.get_path("stdlib"),
            "--output",
            str(prefix),
            "--train-tokenizer",
            str(VOCABULARY),
        ]
        data_command.run(parser.parse_args([*flags, "--overwrite"]))
    return prefix


def table(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The end of each run, and how far the first two are apart on the way."""
    rows = ["| run | loss | imbalance |", "|---|---|---|"]
    for name, lines in runs.items():
        loss, imbalance = (series(lines, key)[1] for key in ("lm_loss", "imbalance"))
        rows.append(f"| {name} | {loss[-20:].mean():.4f} | {imbalance[-20:].mean():.5f} |")
    rows.append("\nmeans of the last 20 steps")
    for key in ("lm_loss", "imbalance"):
        late, now, none = (series(runs[name], key)[1] for name in (LAGS, SYNCHRONOUS, NONE))
        apart, effect = np.abs(late - now), np.abs(now - none)
        rows.append(
            f"{key}: {LAGS} and {SYNCHRONOUS} differ by {apart.mean():.2g} in the mean over steps "
            f"({apart.max():.2g} at most), {SYNCHRONOUS} and {NONE} by {effect.mean():.2g}"
        )
    return rows


def main() -> None:
    """Train the three, draw and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/balance_lag"))
    parser.add_argument("--output", type=Path, default=Path("runs/balance_lag/balance_lag.png"))
    parser.add_argument("--train-iters", type=int, default=300)
    parser.add_argument("--head-balance-coeff", type=float, default=1e-2)
    args = parser.parse_args()
    prefix = text(args.dir)
    found = {}
    for name, flags in runs_of(args.head_balance_coeff).items():
        folder = args.dir / f"{name.split()[0]}-{time.strftime('%Y%m%d-%H%M%S')}"
        own = ["--data-path", str(prefix), "--tokenizer-model", f"{prefix}-tokenizer"]
        steps = ["--train-iters", str(args.train_iters)]
        launch([*FLAGS.split(), *own, *steps, *flags], folder, 1, args.train_iters)
        found[name] = read_metrics(folder)
    save(draw_comparison(found), args.output)
    print(f"coefficient {args.head_balance_coeff:g}, {args.train_iters} steps, ", end="")
    print(f"{os.cpu_count()} cores\n")
    print("\n".join(table(found)))
    print(f"picture: {args.output}")


if __name__ == "__main__":
    main()
