"""The two runs of ``megasink demo``, with their summary and picture."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape

from megasink.cli.data import main as data
from megasink.figures.importance_heatmap import draw_importances
from megasink.figures.run_figure import read_metrics, series, smoothed
from megasink.figures.style import BLUE, DASHES, VERMILION, WIDTH, label, save, styled
from megasink.files.atomic import atomic_text
from megasink.training.launch import launch

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-"
BOS, EOD = "<s>", "</s>"
AROUND = 2
"""Tokens of a document besides its letters: BOS before them, EOD after them."""

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


def write_tokenizer(folder: Path) -> None:
    """Write a Hugging Face tokenizer of BOS (before texts), EOD and letters; others are dropped."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: i for i, name in enumerate((BOS, EOD, *LETTERS))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", None, [(BOS, 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOD)
    fast.save_pretrained(folder)


def texts_of(ids_DL: Ids) -> Iterator[str]:
    """Yield the documents as text."""
    names = np.array(list(LETTERS))
    return ("".join(names[row]) for row in ids_DL)


def chain_of(seed: int, letters: int, concentration: float) -> Floats:
    """Return an [N, N] matrix of transitions, every row drawn from a Dirichlet distribution."""
    random = np.random.default_rng(seed)
    return random.dirichlet(np.full(letters, concentration), letters)


def next_letters(rows_NN: Floats, last_D: Ids, random: np.random.Generator) -> Ids:
    """Draw a letter after each of `last_D`; `rows_NN` is cumulative."""
    drawn = (rows_NN[last_D] < random.random(len(last_D))[:, None]).sum(1)
    return drawn.clip(max=len(rows_NN) - 1)


@dataclass(frozen=True)
class TriggerLanguage:
    """A Markov chain of letters; each trigger is followed by the letter before it."""

    # Triggers are the first letters of `LETTERS`, and never first in a document or side by side.
    # `chain` seeds the transitions, rows of a Dirichlet distribution.

    letters: int = len(LETTERS)
    triggers: int = 4
    chain: int = 6
    concentration: float = 0.1

    def __post_init__(self) -> None:
        check_letters(self.letters)
        if not 0 <= self.triggers < self.letters:
            raise ValueError(f"triggers {self.triggers}: use 0 to {self.letters - 1}")

    @cached_property
    def transitions_NN(self) -> Floats:
        """Probabilities of the letter after a non-trigger letter, float64."""
        return chain_of(self.chain, self.letters, self.concentration)

    def sample(self, documents: int, length: int, seed: int) -> Ids:
        """Return documents as [D, L] int64 ids of letters."""
        random = np.random.default_rng(seed)
        rows_NN = self.transitions_NN.cumsum(1)
        ids_DL = np.empty((documents, length), dtype=np.int64)
        ids_DL[:, 0] = random.integers(self.triggers, self.letters, documents)
        for t in range(1, length):
            ids_DL[:, t] = next_letters(rows_NN, ids_DL[:, t - 1], random)
            if t > 1:
                copies_D = ids_DL[:, t - 1] < self.triggers
                ids_DL[copies_D, t] = ids_DL[copies_D, t - 2]
        return ids_DL

    def copies(self, text: str) -> tuple[int, int]:
        """Count the triggers inside a text, and those followed by the letter before them."""
        triggers = LETTERS[: self.triggers]
        places = [i for i in range(1, len(text) - 1) if text[i] in triggers]
        return len(places), sum(text[i + 1] == text[i - 1] for i in places)


def check_letters(letters: int) -> None:
    if not 2 <= letters <= len(LETTERS):
        raise ValueError(f"{letters} letters: use 2 to {len(LETTERS)}")


LANGUAGE = TriggerLanguage()
LENGTH = 62  # letters; with BOS and EOD, a document fills a sample
# A few more than the steps and evaluations need.
DOCUMENTS = 5000
RUNS = {"no-loss": "0", "loss": "1e-2"}
"""Run -> --head-balance-coeff."""
WITH = f"with the loss ({RUNS['loss']})"
# Two layers of eight heads, which two laptop cores train in half a minute, on two ranks.
FLAGS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 8
    --seq-length 64 --max-position-embeddings 64
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 2
    --micro-batch-size 4 --global-batch-size 8
    --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05
    --attention-variant vanilla --split 95,5,0 --eval-interval 50 --eval-iters 4
    --log-sink-rate --save-interval 150 --log-interval 10 --num-workers 0
"""
_PROMPT_LETTERS = 8


def demonstrate(directory: Path, steps: int) -> None:
    """Train both runs, then print and draw their results."""
    began = time.monotonic()
    console = Console(highlight=False)
    prefix, tokenizer = directory / "language", directory / "tokenizer"
    console.print("[bold]1. a language of letters -> tokens[/bold]")
    _make_data(prefix, tokenizer, max(DOCUMENTS, 9 * steps), console)
    folder = directory / time.strftime("%Y%m%d-%H%M%S")
    for number, (name, coeff) in enumerate(RUNS.items(), 2):
        how = f"{'without' if coeff == '0' else 'with'} the head-balance loss (coefficient {coeff})"
        console.print(f"\n[bold]{number}. train {how}[/bold]")
        flags = [*FLAGS.split(), "--train-iters", str(steps)]
        flags += ["--data-path", str(prefix), "--tokenizer-model", str(tokenizer)]
        launch([*flags, "--head-balance-coeff", coeff], folder / name, 2, steps)
    console.print("\n[bold]4. results[/bold]")
    for line in summary(folder):
        console.print(line, soft_wrap=True, markup=False)
    console.print("\n[bold]5. a sample of the second model[/bold]")
    _sample(folder / "loss", console)
    console.print(f"\ndone in {time.monotonic() - began:.0f} s")


def _make_data(prefix: Path, tokenizer: Path, documents: int, console: Console) -> None:
    text = prefix.with_suffix(".jsonl")
    texts = list(texts_of(LANGUAGE.sample(documents, LENGTH, seed=1)))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    # First: the next demo recognizes the folder by it.
    atomic_text(text, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    write_tokenizer(tokenizer)
    console.print(f"  a document: {texts[0]}")
    console.print(
        f"  Each of {' '.join(LETTERS[: LANGUAGE.triggers])} is followed by a copy of the "
        "letter before it. Every other letter depends only on the one before it."
    )
    words = [str(text), "--output", str(prefix), "--tokenizer", str(tokenizer), "--overwrite"]
    data([*words, "--workers", "1"])


def summary(folder: Path) -> list[str]:
    """Draw demo.png, and return lines of text about both runs."""
    lines = {name: read_metrics(folder / name) for name in RUNS}
    picture = _draw(lines, folder / "demo.png")
    last = {name: [x for x in of if "lm_loss" in x][-1] for name, of in lines.items()}
    losses = {
        name: [x["valid_lm_loss"] for x in of if x.get("valid_lm_loss") is not None][-1:]
        for name, of in lines.items()
    }
    both = f", {WITH} ".join
    first = lines["no-loss"][0]
    seconds = sorted(x["seconds"] for x in lines["no-loss"] if "lm_loss" in x)
    per_step = first["tokens"] / first["iteration"]
    traced = f"megasink analyze {folder}/loss --checkpoints --data {folder.parent}/language.jsonl"
    rows: list[tuple[str, Any]] = [
        ("loss", f"{first['lm_loss']:.3f} -> {last['no-loss']['lm_loss']:.3f} nats per token"),
        ("speed", f"{per_step / seconds[len(seconds) // 2]:,.0f} tokens/s (median step)"),
    ]
    if all(losses.values()):
        rows.append(("validation", both(f"{of[0]:.3f}" for of in losses.values())))
    rows += [
        ("head imbalance", both(f"{x['imbalance']:.3f}" for x in last.values())),
        ("picture", picture),
        ("the heads", f"{traced} --output {folder}/trace"),
        ("both runs", f"megasink compare {folder}/no-loss {folder}/loss"),
        ("TensorBoard", f"tensorboard --logdir {folder}"),
        ("your own text", "megasink data FILES --output PREFIX --train-tokenizer 32000"),
    ]
    return [f"  {name:15} {value}" for name, value in rows]


@styled()
def _draw(runs: Mapping[str, list[dict[str, Any]]], output: Path) -> Path:
    """Draw loss, sinks and imbalance by step, and head importance at the end; return the path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 0.85))[:, 0]
    axes = [*above.subplots(1, 3), *below.subplots(1, len(runs))]
    names = dict(zip(runs, ("without the loss", WITH), strict=True))
    maps = []
    styles = [{"color": BLUE}, {"color": VERMILION, "linestyle": DASHES[1]}]
    for (name, lines), style in zip(runs.items(), styles, strict=True):
        steps, loss = series(lines, "lm_loss")
        axes[0].plot(steps, smoothed(loss), label=names[name], **style)
        axes[1].plot(*series(lines, "valid_sink_rate_first_key"), marker="o", **style)
        steps, imbalance = series(lines, "imbalance")
        axes[2].plot(steps, imbalance, color=style["color"], alpha=0.2, linewidth=0.7)
        axes[2].plot(steps, smoothed(imbalance), **style)
        importance = [line for line in lines if "importance" in line][-1]["importance"]
        maps.append((f"head importance {names[name]}", np.asarray(importance, dtype=float)))
    label(axes[0], "training loss, moving average", "nats per token", "step")
    axes[0].legend()
    label(axes[1], "heads with a sink on the first token", "% of heads", "step")
    axes[1].set_ylim(bottom=0)
    label(axes[2], "head imbalance", "coefficient of variation", "step")
    axes[2].set_ylim(bottom=0)
    draw_importances(below, axes[3:], maps)
    save(figure, output)
    return output


def _sample(run: Path, console: Console) -> None:
    """Continue the beginning of a new document, and count the triggers it understood."""
    (prompt,) = texts_of(LANGUAGE.sample(1, _PROMPT_LETTERS, seed=2))
    # In a separate process, because this one must not become a Megatron rank. On one thread: more
    # do not speed up single tokens of so small a model.
    flags = ["--prompt", prompt, "--temperature", "0.7", "--seed", "7"]
    flags += ["--max-new-tokens", str(LENGTH - _PROMPT_LETTERS)]
    command = [sys.executable, "-m", "megasink", "generate", str(run), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    text = made.stdout.strip()
    triggers, copied = LANGUAGE.copies(text)
    console.print(f"  {escape(text)}")
    console.print(
        f"  triggers after which the letter before them is repeated: {copied} of {triggers}"
    )
