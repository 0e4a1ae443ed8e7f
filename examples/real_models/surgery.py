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
import torch

import megasink
from examples.real_models.needs import need_llama
from examples.real_models.rounding import rounded_losses
from examples.real_models.texts import read_texts, whole_files
from examples.real_models.wheels import FOLDER, told
from examples.real_models.zeroing import append, losses, open_results
from examples.steps import command
from megasink.checkpoints.find import newest_checkpoint
from megasink.console.progress import tracked
from megasink.files.atomic import atomic_text
from megasink.transformers.model_identity import weights_hash

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
STEPS, ROUNDS, TOKENS, RATE = 30, (0, 1, 3, 4), 256, 3e-4
"""Of a round; rounds that are measured; of a step, which is one sample; learning rate after ten."""
FILES, TEXTS, MEASURED_TOKENS = 24, 9, 128
"""Files to train on; texts to measure, of three domains in turn, and their length."""


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
        command("convert-from-hf", str(model), "--output", str(start), "--device", "cpu", *convert)
    if not until:
        return start
    # A start ends with its round, and earlier rounds may have been measured elsewhere.
    while (newest_checkpoint(run / "checkpoints") or 0) < until:
        command(
            *("train", *shlex.split((start / "flags.txt").read_text()), *train),
            *("--load", str(start / "checkpoints"), "--finetune", "--run-dir", str(run)),
            *("--resume", "auto", "--data-path", str(corpus(model, work)), "--split", "100,0,0"),
            *("--device", "cpu", "--ranks", "1", "--seq-length", str(TOKENS)),
            *("--train-iters", str(STEPS * ROUNDS[-1]), "--exit-interval", str(STEPS)),
            *("--save-interval", str(STEPS)),
            *("--micro-batch-size", "1", "--global-batch-size", "1", "--eval-iters", "0"),
            *("--lr", str(RATE), "--min-lr", str(RATE), "--lr-decay-style", "constant"),
            *("--lr-warmup-iters", str(STEPS // 3), "--weight-decay", "0.1", "--clip-grad", "1.0"),
            *("--head-balance-coeff", "0"),
        )
    return run


def analyzed(hub: Any) -> dict[str, Any]:
    """Return the loss of each text, and what `megasink.analyze` says of the first token."""
    texts = [text.text for text in read_texts()[:TEXTS]]
    found = megasink.analyze(
        hub, texts, seq_length=MEASURED_TOKENS, max_samples=None, bos="none", loss=False
    )
    awft_NLH = found.by_sample["awft"]
    rows = (hub.tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts)
    with torch.no_grad():
        loss = [float(losses(hub.model, torch.tensor([r[:MEASURED_TOKENS]]))) for r in rows]
    return {
        "loss": [round(value, 5) for value in loss],
        "awft": awft_NLH.mean(0).round(4).tolist(),
        "awft_by_text": awft_NLH.mean((1, 2)).round(5).tolist(),
        "sink_rate": round(float((awft_NLH > 0.3).mean()), 5),
        "massive_ratio": found.values("massive_ratio").round(2).tolist(),
        "importance": round(float(np.nanmean(found.values("importance"))), 5),
    }


def exported(arm: str, steps: int, model: Path, work: Path) -> Path:
    """Return a folder of Hugging Face with an arm after so many steps."""
    if arm == "vanilla" and not steps:
        return model
    folder = work / f"{arm}-{steps}"
    if not (folder / "config.json").is_file():
        run = trained(arm, steps, model, work)
        command(
            "convert-to-hf",
            str(run),
            "--output",
            str(folder),
            "--device",
            "cpu",
            "--iteration",
            str(steps),
        )
    return folder


def examine(model: Path, most: int | None) -> None:
    """Train and measure what is missing; at most so many stages."""
    need_llama(model)
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
            for number in ROUNDS
            for arm in ARMS
            for what in ("analysis", "rounding")
            # Gates begin as the model does; rounding takes as long as all else.
            if (arm, number) != ("gated", 0) and (what == "analysis" or number in (0, ROUNDS[-1]))
        ]
        left = [stage for stage in stages if stage not in done][:most]
        for arm, steps, what in tracked(left, "surgery", len(left), "stages"):
            hub = megasink.load_model(exported(arm, steps, model, work), device="cpu")
            found = analyzed(hub) if what == "analysis" else rounded_losses(hub)
            append(file, {"arm": arm, "steps": steps, "what": what} | found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Operate on every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="Hugging Face folders")
    parser.add_argument("--stages", type=int, help="stop after so many; default: all")
    args = parser.parse_args(arguments)
    for folder in args.models:
        with told(str(FOLDER)):
            examine(folder, args.stages)
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "surgery.py")
