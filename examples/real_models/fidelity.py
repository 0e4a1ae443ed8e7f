"""A real model in Megatron and back: the same logits, steps of training and bytes.

    python -m examples.real_models.fidelity runs/real-models/smollm2

converts the folder to a run, whose logits `convert-from-hf` compares with those of transformers;
trains it for 20 steps on one rank, TP 3 and PP 2, and beside it transformers with torch's AdamW;
and converts the run back, whose weights are compared byte by byte. Every step sees the same text,
so that no order of reading enters. What was trained on one rank is exported, too, and the
perplexity of other texts compared, in Megatron and in transformers. Writes
runs/real-models/fidelity-NAME.json.
"""

import argparse
import json
import math
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import megasink
from examples.real_models.needs import need_llama
from examples.real_models.texts import MEASURED, read_texts
from examples.real_models.wheels import FOLDER, told
from examples.real_models.zeroing import losses
from examples.steps import command
from megasink.console.progress import tracked
from megasink.files.atomic import atomic_text

STEPS, TOKENS, RATE, CLIP, DECAY = 20, 256, 1e-4, 1.0, 0.1
HELD_OUT = 24
"""Texts of the perplexity, of `TOKENS` at most."""
NEW, PROMPT = 200, "Attention in a language model"
LAYOUTS: dict[str, tuple[tuple[str, ...], int]] = {
    "one rank": ((), 1),
    "TP 3": (("--tensor-model-parallel-size", "3"), 3),
    "PP 2": (("--pipeline-model-parallel-size", "2"), 2),
}
"""Layout -> flags, and ranks."""


def run(*words: str) -> str:
    """Run a command of megasink, and return what it printed; see `examples.steps.command`."""
    printed: str = command(*words, stdout=subprocess.PIPE, text=True).stdout
    return printed


def write_data(folder: Path, work: Path) -> list[int]:
    """Write a corpus whose every sample of `TOKENS` is the same, and return a sample's tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    whole = " ".join(text.text for text in read_texts()[MEASURED:][:3])
    offsets = tokenizer(whole, return_offsets_mapping=True)["offset_mapping"]
    # The corpus ends each document with one more token. Some ends of a text cut a token apart.
    ends = (whole[:end] for _, end in offsets[TOKENS // 2 :])
    text = next(t for t in ends if len(tokenizer(t)["input_ids"]) == TOKENS - 1)
    data = work / "text.jsonl"
    data.write_text(2 * STEPS * (json.dumps({"text": text}) + "\n"))
    run(
        "data", str(data), "--output", str(work / "text"), "--tokenizer", str(folder), "--overwrite"
    )
    kind = np.uint16 if len(tokenizer) <= 1 << 16 else np.int32
    ids: list[int] = np.fromfile(work / "text.bin", kind, count=TOKENS).tolist()
    return ids


def trained_in_megatron(start: Path, work: Path, layout: str) -> list[dict[str, float]]:
    """Return loss and gradient norm of each step under a layout."""
    flags, ranks = LAYOUTS[layout]
    output = work / layout.replace(" ", "-")
    if len(steps_of(output)) < STEPS:
        shutil.rmtree(output, ignore_errors=True)  # of a run that was killed
        run(
            *("train", *shlex.split((start / "flags.txt").read_text())),
            *("--load", str(start / "checkpoints"), "--finetune", "--run-dir", str(output)),
            *("--data-path", str(work / "text"), "--split", "100,0,0", "--device", "cpu", *flags),
            *("--ranks", str(ranks), "--seq-length", str(TOKENS), "--train-iters", str(STEPS)),
            *("--micro-batch-size", "1", "--global-batch-size", "1", "--eval-iters", "0"),
            *("--lr", str(RATE), "--min-lr", str(RATE), "--lr-decay-style", "constant"),
            *("--weight-decay", str(DECAY), "--clip-grad", str(CLIP), "--save-interval", "1000"),
            *("--head-balance-coeff", "0", "--adam-beta2", "0.999"),
        )
    return steps_of(output)


def steps_of(output: Path) -> list[dict[str, float]]:
    """Return loss and gradient norm of each step of a run; none if it did not begin."""
    path = output / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.is_file() else ())
    return [
        {"loss": line["lm_loss"], "norm": line["grad_norm"]} for line in lines if "lm_loss" in line
    ]


def trained_in_transformers(folder: Path, ids: list[int]) -> list[dict[str, float]]:
    """Return the same of transformers and torch's AdamW; as in Megatron, vectors do not decay."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    # torch leaves the gradient of this token's embedding out; here it ends the document.
    model.get_input_embeddings().padding_idx = None
    groups = [
        {
            "params": [p for p in model.parameters() if (p.ndim > 1) == decayed],
            "weight_decay": decay,
        }
        for decayed, decay in ((True, DECAY), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    row = torch.tensor([[*ids, ids[0]]])  # the next sample begins as this one does
    steps = []
    for _ in tracked(range(STEPS), "transformers", STEPS, "steps"):
        logits = model(row[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[0], row[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        steps.append({"loss": float(loss), "norm": float(norm)})
    return steps


def apart(one: Sequence[dict[str, float]], other: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the largest relative difference over steps, of loss and of gradient norm."""
    return {
        key: max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(one, other, strict=True))
        for key in ("loss", "norm")
    }


def equal_weights(one: Path, other: Path) -> dict[str, int]:
    """Count the tensors of two folders, and those that are not equal byte by byte."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    differ = ours.keys() ^ theirs.keys()
    differ |= {name for name in ours.keys() & theirs if not torch.equal(ours[name], theirs[name])}
    return {"tensors": len(theirs), "different": len(differ)}


def same_text(one: Path, other: Path) -> int:
    """Return how many of 200 greedy tokens two folders have in common before they part."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = []
    for folder in (one, other):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        prompt = tokenizer(PROMPT, return_tensors="pt")
        ids = model.generate(**prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        texts.append(ids[0, prompt["input_ids"].shape[1] :].tolist())
    return next((n for n, (a, b) in enumerate(zip(*texts, strict=True)) if a != b), NEW)


@torch.no_grad()
def perplexities(run_folder: Path, exported: Path) -> dict[str, float]:
    """Return the perplexity of texts under a run, in Megatron, and its export, in transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = [text.text for text in read_texts()[:HELD_OUT]]
    ours = megasink.analyze(
        megasink.load_run(run_folder, device="cpu"), texts, seq_length=TOKENS, bos="none"
    )
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    nats, targets = 0.0, 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:TOKENS]
        nats += float(losses(model, torch.tensor([ids]))) * (len(ids) - 1)
        targets += len(ids) - 1
    return {"megatron": float(ours.perplexity.number), "transformers": math.exp(nats / targets)}


def examine(folder: Path) -> dict[str, Any]:
    """Return everything that was compared."""
    need_llama(folder)
    work = FOLDER / f"{folder.resolve().name}.fidelity"
    work.mkdir(parents=True, exist_ok=True)
    start, back = work / "run", work / "back"
    if not (work / "verified.txt").is_file():
        said = run("convert-from-hf", str(folder), "--output", str(start), "--device", "cpu")
        (line,) = [line for line in said.splitlines() if line.startswith("verified")]
        atomic_text(work / "verified.txt", line + "\n")
    if not (back / "config.json").is_file():
        run("convert-to-hf", str(start), "--output", str(back), "--device", "cpu")
    ids = write_data(folder, work)
    path = work / "transformers.json"
    if not path.is_file():
        atomic_text(path, json.dumps(trained_in_transformers(folder, ids)))
    theirs = json.loads(path.read_text())
    ours = {layout: trained_in_megatron(start, work, layout) for layout in LAYOUTS}
    trained = work / "trained"
    if not (trained / "config.json").is_file():
        run("convert-to-hf", str(work / "one-rank"), "--output", str(trained), "--device", "cpu")
    return {
        "model": folder.resolve().name,
        "verified": (work / "verified.txt").read_text().strip(),
        "weights": equal_weights(back, folder),
        "same_greedy_tokens": same_text(back, folder),
        "transformers": theirs,
        "apart": {layout: apart(steps, theirs) for layout, steps in ours.items()},
        "perplexity": perplexities(work / "one-rank", trained),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="Hugging Face folders")
    for folder in parser.parse_args(arguments).models:
        found = examine(folder)
        path = FOLDER / f"fidelity-{found['model']}.json"
        with told(str(path)):
            atomic_text(path, json.dumps(found, indent=1, allow_nan=False) + "\n")
        print(f"{path}: {found['apart']}")
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "fidelity.py")
