"""The command lines that meet the faults: every command of the CLI."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.analysis.capture.tiny_models import tiny_model
from tests.chats import chat_tokenizer, conversations, write_chats
from tests.damage.harness import Sound
from tests.damage.sound import FLAGS, MODEL


@dataclass(frozen=True)
class Line:
    """A command line, in which {out} is its output.

    Attributes:
        words: the command and its arguments.
        kept: patterns of what may stay after a failure: the same command goes on from it.
        prepare: puts into the folder of the output what is there before.
        starts: whether it starts processes with the faults of its own.
    """

    words: Sequence[object]
    kept: Sequence[str] = ()
    prepare: Callable[[Path], None] | None = None
    starts: bool = False


def _deep(folder: str) -> list[str]:
    return [folder + "/*" * depth for depth in (1, 2, 3)]


def make_chats(sound: Sound) -> Path:
    """Write a model with a chat template, and conversations; return their folder."""
    root = sound.root / "finetune"
    if not root.is_dir():
        root.mkdir()
        chat_tokenizer(sound.tokenizer, root / "model")
        tokens = len(json.loads((root / "model" / "tokenizer.json").read_text())["model"]["vocab"])
        tiny_model("llama", vocab_size=tokens + 2).save_pretrained(root / "model")
        write_chats(root / "chats.jsonl", conversations(8, exchanges=1, words=3))
    return root


def lines(sound: Sound) -> dict[str, Line]:
    """Return {command: its line}; a command may have several, told apart by a slash."""
    texts = ["--data", sound.root / "texts.jsonl", "--device", "cpu"]
    shards = ("out/settings.json", "out/partial/*", "out/points/*", "out/points/*/*")
    # The numbers are whole before the page is drawn; the shards stay until both are there.
    numbers = ("out/results.json", "out/*.npz")

    chats = make_chats(sound)
    run = (*MODEL, "--tokenizer-model", sound.tokenizer, "--data-path", sound.data)
    run += ("--train-iters", 1)

    # The same command starts again over them.
    begun = ("out/config.json", "out/config.toml", "out/*.jsonl", "out/*/*", "out/*/*/*")
    begun += ("out/logs/*/*/*/*/*",)
    # The next demo begins with the language and the tokenizer anew; a begun run can be resumed.
    language = [f"out/language.{end}" for end in ("jsonl", "json", "bin", "idx")]
    played = [*language, "out/tokenizer/*", *("out" + "/*" * depth for depth in range(3, 10))]

    def run_there(place: Path) -> None:
        ignore = shutil.ignore_patterns("data-cache", "tensorboard", "checkpoints", "logs")
        shutil.copytree(sound.run, place / "out", ignore=ignore)

    def analysis_there(place: Path) -> None:
        shutil.copytree(sound.analysis, place / "out")

    return {
        "analyze": Line(
            ["analyze", sound.hf, *texts, *FLAGS["analyze"], "--output", "{out}"],
            (*shards, *numbers),
        ),
        "analyze/run": Line(
            [
                "analyze",
                sound.run,
                "--checkpoints",
                *texts,
                "--max-samples",
                2,
                "--output",
                "{out}",
            ],
            (*shards, "out/iter_*/*", "out/iter_*/*/*"),
        ),
        "ablate": Line(["ablate", sound.hf, *texts, *FLAGS["ablate"], "--output", "{out}"], shards),
        "sweep": Line(
            ["sweep", sound.hf, *texts, *FLAGS["sweep"], "--output", "{out}"],
            (*shards, "out/partial/*/*"),
        ),
        "evaluate": Line(
            [
                *("evaluate", sound.hf, "--tasks", "docstrings_perplexity", "--limit", 2),
                *("--samples", "--batch-size", 2, "--device", "cpu", "--output", "{out}"),
            ]
        ),
        "train": Line(
            ["train", *run, "--ranks", 1, "--device", "cpu", "--run-dir", "{out}"], begun
        ),
        "train/rank": Line(["rank", *run, "--run-dir", "{out}"], begun),
        "plan": Line(["plan", *run, "--ranks", 1]),
        "finetune": Line(
            [
                *("finetune", chats / "model", "--data", chats / "chats.jsonl", "--lora-rank", 2),
                *("--seq-length", 32, "--global-batch-size", 4, "--micro-batch-size", 4),
                *("--output", "{out}"),
            ],
            [
                "out/settings.json",
                "out/model/*",
                *_deep("out/before"),
                *_deep("out/run"),
                *_deep("out/after"),
            ],
        ),
        "demo": Line(["demo", "--train-iters", 1, "--output", "{out}"], played),
        "report": Line(["report", sound.analysis, sound.other, "--output", "{out}"]),
        "report/own": Line(["report", "{out}", "--output", "{out}"], prepare=analysis_there),
        "compare": Line(["compare", sound.run, sound.run2, "--output", "{out}.png"]),
        "compare/own": Line(["compare", "{out}"], prepare=run_there),
        "data": Line(
            [
                *("data", sound.root / "texts.jsonl", "--output", "{out}/text"),
                *("--train-tokenizer", 400, "--workers", 1),
            ],
            ("out/text-tokenizer/*",),  # whole, and said
        ),
        "data/workers": Line(
            [
                *("data", sound.root / "texts.jsonl", "--output", "{out}/text"),
                *("--tokenizer", sound.tokenizer, "--workers", 2),
            ]
        ),
        "generate": Line(
            ["generate", sound.run, "--prompt", "Text", "--device", "cpu", "--max-new-tokens", 4]
        ),
        "checkpoints": Line(["checkpoints", sound.run, "--verify"]),
        "recipes": Line(["recipes"]),
        "convert-to-hf": Line(["convert-to-hf", sound.run, "--output", "{out}", "--device", "cpu"]),
        "convert-to-hf/plain": Line(
            ["convert-to-hf", sound.run, "--output", "{out}", "--no-verify"]
        ),
        "convert-from-hf": Line(
            ["convert-from-hf", sound.hf, "--output", "{out}", "--device", "cpu"]
        ),
        "convert-from-hf/plain": Line(
            ["convert-from-hf", sound.hf, "--output", "{out}", "--no-verify"]
        ),
        "doctor": Line(["doctor", "--no-self-test"]),
        "doctor/json": Line(["doctor", "--json", "--no-self-test"]),
    }
