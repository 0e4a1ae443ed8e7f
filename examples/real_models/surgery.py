"""Sink surgery: a real model trained on as it is, with sinks, and with gates.

    python -m examples.real_models.surgery runs/real-models/smollm2

converts the folder to three runs of Megatron, trains all weights of each on the same documentation
and code, a round of steps after the other across the three, exports each round, and analyzes it.
Results are lines of runs/real-models/surgery-NAME.jsonl: a line for each arm and round, so that a
measurement that is stopped is one of fewer steps. Texts that are measured are in no training file.
"""

import argparse
import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import megasink
from examples.real_models.analyses import data_files
from examples.real_models.rounding import rounded_losses
from examples.real_models.texts import whole_files
from examples.real_models.wheels import FOLDER, told
from examples.real_models.zeroing import append, open_results
from examples.steps import command
from megasink.analysis.api.analysis import read_analysis
from megasink.analysis.capture.identity import weights_hash
from megasink.atomic import atomic_text
from megasink.checkpoints.find import newest_checkpoint
from megasink.progress import tracked

ARMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "vanilla": ((), ()),
    # A logit is one number, and moves by the learning rate in a step.
    "sink": (
        ("--attention-variant", "sink", "--sink-weight", "0.2"),
        ("--sink-lr-mult", "100"),
    ),
    "gated": (("--attention-variant", "gated"), ()),
}
"""Arm -> flags of the conversion, and of the training."""
STEPS, ROUNDS, TOKENS, RATE = 40, 3, 256, 3e-4
"""Of a round; at most; of a step, which is one sample; learning rate after ten steps."""
FILES, TEXTS, MEASURED_TOKENS = 24, 8, 128
"""Files to train on; texts of a domain to measure, and their length."""


def corpus(model: Path, work: Path) -> Path:
    """Return the prefix of the tokens to train on."""
    prefix, text = work / "text", work / "text.jsonl"
    if not prefix.with_suffix(".json").is_file():
        lines = (json.dumps({"text": each.text}) + "\n" for each in whole_files(FILES))
        atomic_text(text, "".join(lines))
        flags = ("--tokenizer", str(model), "--overwrite")
        command("data", str(text), "--output", str(prefix), *flags)
    return prefix


def trained(arm: str, until: int, model: Path, work: Path) -> Path:
    """Return a run of `until` steps; convert the model and go on with the training as needed."""
    start, run = work / f"{arm}-start", work / arm
    convert, train = ARMS[arm]
    if not (start / "flags.txt").is_file():
        shutil.rmtree(start, ignore_errors=True)
        command("convert-from-hf", str(model), str(start), "--cpu", *convert)
    if not until:
        return start
    if (newest_checkpoint(run / "checkpoints") or 0) < until:
        command(
            *("train", *shlex.split((start / "flags.txt").read_text()), *train),
            *("--load", str(start / "checkpoints"), "--finetune", "--run-dir", str(run)),
            *("--resume", "auto", "--data-path", str(corpus(model, work)), "--split", "100,0,0"),
            *("--cpu", "--ranks", "1", "--seq-length", str(TOKENS)),
            *("--train-iters", str(STEPS * ROUNDS), "--exit-interval", str(STEPS)),
            *("--save-interval", str(STEPS), "--save-retain-interval", "1000000"),
            *("--micro-batch-size", "1", "--global-batch-size", "1", "--eval-iters", "0"),
            *("--lr", str(RATE), "--min-lr", str(RATE), "--lr-decay-style", "constant"),
            *("--lr-warmup-iters", "10", "--weight-decay", "0.1", "--clip-grad", "1.0"),
            *("--head-balance-coeff", "0"),
        )
    return run


def analyzed(folder: Path, output: Path) -> dict[str, Any]:
    """Return what `megasink analyze` says of a model: its loss by text, and its first token."""
    if not (output / "report.html").is_file():
        command(
            *("analyze", str(folder), "--data", *data_files("few"), "--bos", "none"),
            *("--max-samples", str(TEXTS), "--seq-length", str(MEASURED_TOKENS)),
            *("--output", str(output), "--overwrite"),
        )
    found = read_analysis(output)
    with np.load(output / "samples.npz", allow_pickle=False) as file:
        loss, ratio = file["metric/loss"], file["metric/massive_ratio"]
        awft = file["metric/awft"]
    return {
        "loss": loss.round(5).ravel().tolist(),
        "awft": awft.mean(0).round(4).tolist(),
        "awft_by_text": awft.mean((1, 2)).round(5).tolist(),
        "sink_rate": round(float((awft > 0.3).mean()), 5),
        "massive_ratio": np.nanmean(ratio, 0).round(2).tolist(),
        "importance": round(float(np.nanmean(found.values("importance"))), 5),
    }


def exported(arm: str, steps: int, model: Path, work: Path) -> Path:
    """Return a folder of Hugging Face with an arm after so many steps."""
    if arm == "vanilla" and not steps:
        return model
    folder = work / f"{arm}-{steps}"
    if not (folder / "config.json").is_file():
        command("convert-to-hf", str(trained(arm, steps, model, work)), str(folder), "--cpu")
    return folder


def examine(model: Path) -> None:
    """Train and measure what is missing."""
    name = model.resolve().name
    work = FOLDER / f"{name}.surgery"
    work.mkdir(parents=True, exist_ok=True)
    facts = {
        "model": name,
        "weights": weights_hash(megasink.load_model(model, device="cpu").model),
        "arms": {arm: list(map(list, flags)) for arm, flags in ARMS.items()},
        "rate": RATE,
        "tokens": TOKENS,
        "texts": TEXTS,
    }
    file, lines = open_results(FOLDER / f"surgery-{name}.jsonl", facts)
    with file:
        done = {(line["arm"], line["steps"], line["what"]) for line in lines}
        stages = [
            (arm, STEPS * number, what)
            for number in range(ROUNDS + 1)
            for arm in ARMS
            for what in ("analysis", "rounding")
            if (arm, number) != ("gated", 0)  # computes what the model does
        ]
        for arm, steps, what in tracked(stages, "surgery", len(stages), "stages"):
            if (arm, steps, what) in done:
                continue
            folder = exported(arm, steps, model, work)
            if what == "analysis":
                found = analyzed(folder, work / f"{arm}-{steps}.look")
            else:
                found = rounded_losses(folder)
            append(file, {"arm": arm, "steps": steps, "what": what} | found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Operate on every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="Hugging Face folders")
    for folder in parser.parse_args(arguments).models:
        with told(str(FOLDER)):
            examine(folder)
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "surgery.py")
