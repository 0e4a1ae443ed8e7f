"""What the head-balance loss does to the heads of a real model: four arms, five seeds, paired.

    python -m examples.real_models.balance runs/real-models/smollm2

Each run is `megasink finetune` on the conversations of chats.py: without a loss, with Eq. 7, and
with Eq. 8 with m = 1 and 3. The arms of a seed see the same samples in the same order and begin
with the same adapters. Results are lines of runs/real-models/balance-NAME.jsonl, seed by seed
across the arms, so that a measurement that is stopped is one with fewer seeds.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import megasink
from examples.real_models.chats import files, quiz_scores
from examples.real_models.needs import need_chats
from examples.real_models.wheels import FOLDER, told
from examples.real_models.zeroing import append, open_results
from examples.steps import command
from megasink.analysis.analysis_folder import read_analysis
from megasink.console.progress import tracked
from megasink.files.atomic import atomic_text
from megasink.files.json_file import read_object
from megasink.finetune.chats import ChatTokenizer, read_chats
from megasink.finetune.sft_training import HELD_OUT
from megasink.transformers.model_identity import weights_hash

ARMS = {"none": (0.0, 0), "eq7": (1e-2, 0), "eq8-m1": (1e-2, 1), "eq8-m3": (1e-2, 3)}
"""Arm -> lambda, and m."""
SEEDS = 5
SETTINGS = {"--seq-length": 256, "--global-batch-size": 1, "--epochs": 0.06, "--lr": 1e-3}
"""And bfloat16, which takes two thirds of the time on a CPU that has it."""


def finetuned(model: Path, arm: str, seed: int, out: Path, first: Path) -> None:
    """Fine-tune a model in `out`; a command that was killed goes on.

    Args:
        first: of another arm, or seed; what was measured there before the training is the same.
    """
    coeff, shared = ARMS[arm]
    own = {"head_balance_coeff": coeff, "shared_heads": shared, "seed": seed}
    if (first / "after").is_dir() and not out.exists():
        # The command refuses a folder whose settings are not those of its flags.
        shutil.copytree(first / "before", out / "before")
        record = read_object(first / "settings.json")
        record["settings"] |= own
        atomic_text(out / "settings.json", json.dumps(record))
    flags = (f"--{name.replace('_', '-')}={value}" for name, value in own.items())
    settings = (str(word) for pair in SETTINGS.items() for word in pair)
    data = ("--data", str(files()[0]), "--output", str(out))
    command("finetune", str(model), "--bf16", *data, *settings, *flags)


def heads(analysis: Path) -> dict[str, Any]:
    """Return importance [L, H] of an analysis, and its head imbalance (Eq. 6)."""
    found = read_analysis(analysis)
    imbalance = found.values("imbalance")
    return {
        "importance": found.values("importance").round(4).tolist(),
        "imbalance": round(float(imbalance.mean()), 5),
    }


@torch.no_grad()
def quizzed(folder: Path) -> list[list[float]]:
    """Return, for each question of chats.py, the mean log-probability per token of the right answer
    and of the likeliest wrong one."""
    items = [json.loads(line) for line in files()[1].read_text().splitlines()]
    hub = megasink.load_model(folder, device="cpu")
    found = []
    for item, row in zip(items, quiz_scores(hub.model.eval(), hub.tokenizer, items), strict=True):
        right = row.pop(item["answer"])
        found.append([round(right, 4), round(max(row), 4)])
    return found


@torch.no_grad()
def held_out(folder: Path) -> float:
    """Return the loss of a model on the conversations that `megasink finetune` holds out: the mean
    over the tokens that the assistant says, in nats."""
    tokenizer, most = ChatTokenizer(folder), SETTINGS["--seq-length"]
    chats = list(read_chats([files()[0]]))
    model = megasink.load_model(folder, device="cpu").model
    total, targets = 0.0, 0
    for chat in chats[-max(1, round(HELD_OUT * len(chats))) :]:
        ids, labels = (torch.tensor([one])[:, :most] for one in tokenizer.read(chat))
        if count := int((labels[:, 1:] != -100).sum()):
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            total, targets = total + float(loss) * count, targets + count
    return total / targets


def examine(folder: Path) -> None:
    """Run and measure what is missing of a model."""
    need_chats(folder)
    name = folder.resolve().name
    work = FOLDER / f"{name}.balance"
    facts = {
        "model": name,
        "weights": weights_hash(megasink.load_model(folder, device="cpu").model),
        "arms": {arm: list(setting) for arm, setting in ARMS.items()},
        "settings": SETTINGS,
    }
    file, lines = open_results(FOLDER / f"balance-{name}.jsonl", facts)
    with file:
        done = {(line["seed"], line["arm"]) for line in lines}
        runs = [(seed, arm) for seed in range(SEEDS) for arm in ARMS]
        first = work / f"{runs[0][1]}-{runs[0][0]}"
        for seed, arm in tracked(runs, "fine-tuning", len(runs), "runs"):
            if (seed, arm) in done:
                continue
            out = work / f"{arm}-{seed}"
            finetuned(folder, arm, seed, out, first)
            if (-1, "before") not in done:
                before = {"seed": -1, "arm": "before"} | heads(out / "before")
                append(file, before | {"quiz": quizzed(folder), "held_out": held_out(folder)})
                done.add((-1, "before"))
            log = read_object(out / "run" / "trainer_state.json")["log_history"]
            (loss,) = (entry["eval_loss"] for entry in log if "eval_loss" in entry)
            line = {
                "seed": seed,
                "arm": arm,
                "loss": [round(entry["loss"], 4) for entry in log if "loss" in entry],
                "held_out": loss,
                "quiz": quizzed(out / "model"),
            }
            append(file, line | heads(out / "after"))
            for made in ("model", "run"):  # half a gigabyte
                shutil.rmtree(out / made)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every arm on every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="Hugging Face folders")
    for folder in parser.parse_args(arguments).models:
        with told(str(FOLDER)):
            examine(folder)
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "balance.py")
