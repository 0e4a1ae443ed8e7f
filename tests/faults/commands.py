"""The command lines that meet the faults: every command of the CLI."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.damage.harness import Sound
from tests.damage.sound import FLAGS


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


def lines(sound: Sound) -> dict[str, Line]:
    """Return {command: its line}; a command may have several, told apart by a slash."""
    texts = ["--data", sound.root / "texts.jsonl", "--device", "cpu"]
    shards = ("out/settings.json", "out/partial/*", "out/points/*", "out/points/*/*")

    def run_there(place: Path) -> None:
        ignore = shutil.ignore_patterns("data-cache", "tensorboard", "checkpoints", "logs")
        shutil.copytree(sound.run, place / "out", ignore=ignore)

    def analysis_there(place: Path) -> None:
        shutil.copytree(sound.analysis, place / "out")

    return {
        "analyze": Line(
            ["analyze", sound.hf, *texts, *FLAGS["analyze"], "--output", "{out}"], shards
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
                *("evaluate", sound.hf, "--tasks", "docstrings_choice", "--limit", 2),
                *("--samples", "--batch-size", 2, "--device", "cpu", "--output", "{out}"),
            ]
        ),
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
