"""``megasink demo``: from real text to a trained sink-attention GPT on this machine, in minutes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from megasink.command_line import CommandParser
from megasink.commands import data as data_command
from megasink.errors import UserError
from megasink.report.curves import read_metrics
from megasink.train.launch import launch

VOCABULARY = 4096
STEPS = 160
# A GPT that two laptop cores train in about three minutes, on two tensor-parallel ranks.
FLAGS = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 8
    --seq-length 256 --max-position-embeddings 256
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
    --tensor-model-parallel-size 2 --sequence-parallel
    --micro-batch-size 8 --global-batch-size 16
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.125
    --attention-variant sink --head-balance-coeff 1e-4
    --split 95,5,0 --eval-interval 40 --eval-iters 4 --log-interval 10
"""

SAMPLE = ["--prompt", "def ", "--max-new-tokens", "96", "--temperature", "0.7", "--seed", "7"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run tokenizer, data, two gloo or CUDA ranks, curves, a sample: 4 minutes on two CPU cores.

    The text is the source of Python's standard library, which every machine has.
    """
    parser = CommandParser(prog="megasink demo", description=main.__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"), help="folder to write to")
    parser.add_argument("--train-iters", type=int, default=STEPS, help="training steps")
    args = parser.parse_args(argv)
    if args.train_iters < 1:
        raise UserError(f"--train-iters {args.train_iters}: use 1 or more")
    began = time.monotonic()
    console = Console(highlight=False)
    prefix = args.dir / "stdlib"
    if not (prefix.with_suffix(".idx").is_file() and prefix.with_suffix(".json").is_file()):
        console.print("[bold]1. the Python standard library -> tokenizer -> tokens[/bold]")
        data = ["stdlib:", "--output", str(prefix), "--train-tokenizer", str(VOCABULARY)]
        data += ["--overwrite"]  # files left by an interrupted demo
        parser = CommandParser()
        data_command.add_arguments(parser)
        data_command.run(parser.parse_args(data))
    else:
        console.print(f"[bold]1. reusing tokens of an earlier demo: {escape(str(prefix))}[/bold]")
    console.print("\n[bold]2. train a sink-attention GPT on two ranks[/bold]")
    run_dir = args.dir / time.strftime("run-%Y%m%d-%H%M%S")
    flags = [*FLAGS.split(), "--train-iters", str(args.train_iters)]
    flags += ["--data-path", str(prefix), "--tokenizer-model", f"{prefix}-tokenizer"]
    launch(flags, run_dir, 2, args.train_iters)
    console.print("\n[bold]3. results[/bold]")
    for line in summary(run_dir):
        console.print(line, soft_wrap=True, markup=False)
    console.print("\n[bold]4. sample[/bold]")
    # In a separate process, as this one must not become a Megatron rank. On one thread: more do not
    # speed up single tokens of so small a model.
    command = [sys.executable, "-m", "megasink.cli", "generate", str(run_dir), *SAMPLE]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    console.print(f"\ndone in {time.monotonic() - began:.0f} s")
    return 0


def summary(run_dir: Path) -> list[str]:
    """Return lines of text that summarize a finished run."""
    lines = read_metrics(run_dir)
    steps = [line for line in lines if "lm_loss" in line]
    evaluations = [line for line in lines if line.get("valid_lm_loss") is not None]
    seconds = sorted(step["seconds"] for step in steps)
    tokens_per_step = steps[0]["tokens"] / steps[0]["iteration"]
    rows: list[tuple[str, Any]] = [
        ("loss", f"{steps[0]['lm_loss']:.3f} -> {steps[-1]['lm_loss']:.3f} nats per token"),
        ("speed", f"{tokens_per_step / seconds[len(seconds) // 2]:,.0f} tokens/s (median step)"),
    ]
    if evaluations:
        last = evaluations[-1]
        text = f"{last['valid_lm_loss']:.3f} nats per token"
        if last.get("valid_bits_per_byte") is not None:
            text += f", {last['valid_bits_per_byte']:.3f} bits per byte"
        rows.append(("validation", text))
    if "imbalance" in steps[-1]:
        rows.append(
            ("head imbalance", f"{steps[0]['imbalance']:.4f} -> {steps[-1]['imbalance']:.4f}")
        )
    config = json.loads((run_dir / "config.json").read_text())["arguments"]
    resume = f"megasink train --run-dir {run_dir} --resume"
    resume += f" --train-iters {2 * config['train_iters']} --override-opt-param-scheduler"
    rows += [
        ("picture", run_dir / "curves.png"),
        ("checkpoint", config["save"]),
        ("TensorBoard", f"tensorboard --logdir {config['tensorboard_dir']}"),
        ("all steps", run_dir / "metrics.jsonl"),
        ("continue", resume),
        ("sample", f"megasink generate {run_dir} --prompt 'import os'"),
        ("your own text", "megasink data FILES --output PREFIX --train-tokenizer 32000"),
    ]
    return [f"  {name:15} {value}" for name, value in rows]
