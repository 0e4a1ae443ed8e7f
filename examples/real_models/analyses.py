"""What `megasink analyze` and `megasink ablate` measure of a model, and how to read it by text.

    python -m examples.real_models.analyses runs/real-models/smollm2

makes the first of them: a report on the measured texts.

Each analysis is a folder of runs/real-models/NAME.look, with a page of its own; one that is there
is left, and a command that was killed goes on.

Shapes: N texts, L layers, H heads, T tokens, S states.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import megasink
from examples.real_models.texts import MEASURED, Text, read_texts, whole_files
from examples.real_models.wheels import FOLDER, told
from examples.steps import command
from megasink.analysis.ablate.measured_points import MeasuredPoint, read_point
from megasink.analysis.analysis_folder import read_analysis
from megasink.analysis.result_schemas import AblationPoint, AblationResults
from megasink.analysis.result_store import Store
from megasink.files.atomic import atomic_file, atomic_text
from megasink.files.checked_fields import from_json
from megasink.files.json_file import read_object

Floats = NDArray[np.float64]

TOKENS = 64
"""Of a text, as in P2 and P4."""
LENGTHS = {False: (8, 16, 32, 64, 128), True: (64, 128, 256, 512, 1024)}
"""Of the measured texts (False), and of `LONG_TEXTS` long ones, which are other texts (True)."""
LONG_TEXTS = 16
DRAWN = (10, 3000)
"""Lowest and highest number of tokens at which long texts are cut at random (P3, Section 4.1)."""
FEW = 60
"""Texts, of the domains in turn, where each number takes a run of the model."""
PERCENTS = ("0", "5", "10", "20", "30")
SCORES = (
    *(f"{score}{form}" for form in ("", "_ln") for score in ("awft", "aeqd", "ftvvn", "avvn")),
    *(f"{score}{form}" for form in ("", "_ln") for score in ("lthon", "ahon")),
    "circuit_ahon_ln",
)
"""P3's twelve, and the best of the others."""
TASK, QUESTIONS = "docstrings_choice", 100
"""The task that comes with megasink, and how many of its questions."""
TASK_FLAGS = ("--score", "ahon_ln", "awft", "--zeroed", "10", "20", "30", "--seeds", "1")

_PLUGIN = ("--plugin", "examples.real_models.geometry")
_COLUMNS = ("--positions", str(TOKENS), "--columns", str(TOKENS))
ANALYSES: dict[str, tuple[str, ...]] = {
    "text": ("measured", *_PLUGIN, *_COLUMNS, "--seq-length", str(TOKENS), "--bos", "none"),
    "bos": ("measured", "--seq-length", str(TOKENS), "--bos", "add"),
    "tokens": (
        *("", "--seq-length", str(TOKENS), "--bos", "none", "--no-loss"),
        *("--inputs", "random", "repeated"),
    ),
    "scored": ("scored", "--seq-length", str(TOKENS), "--bos", "none", "--no-loss"),
    "cut": ("long", "--bos", "none", "--no-loss", "--batch-size", "1"),
}
"""Analysis -> texts, if any, and flags of `megasink analyze`. Thresholds are set on `scored`; `cut`
is at lengths drawn at random, `DRAWN` or up to the model's positions."""


def data_files(kind: str) -> list[str]:
    """Return a file for each domain with the texts of a kind; write them if they are missing.

    Kinds: "measured" and "scored" as in texts.py, "few", the first `FEW` of the measured, and
    "long", those of `long_texts`.
    """
    texts = long_texts() if kind == "long" else read_texts()
    few = {"measured": slice(MEASURED), "scored": slice(MEASURED, None), "few": slice(FEW)}
    of = texts[few.get(kind, slice(None))]
    folder, paths = FOLDER / "texts" / kind, []
    for domain in sorted({text.domain for text in of}):
        path = folder / f"{domain}.jsonl"
        if not path.is_file():
            lines = (json.dumps({"text": text.text}) for text in of if text.domain == domain)
            with told(str(path)):
                folder.mkdir(parents=True, exist_ok=True)
                atomic_text(path, "\n".join(lines) + "\n")
        paths.append(str(path))
    return paths


@dataclass(frozen=True)
class Samples:
    """Metrics by text: `samples["awft"]` is [N, L, H].

    Attributes:
        dataset_N: dataset of each text, such as "prose".
    """

    arrays: dict[str, Any]
    dataset_N: NDArray[np.str_]

    def __getitem__(self, metric: str) -> Floats:
        found: Floats = self.arrays[f"metric/{metric}"]
        return found

    def of(self, dataset: str) -> "Samples":
        """Return the samples of one dataset."""
        at = self.dataset_N == dataset
        return Samples({key: values[at] for key, values in self.arrays.items()}, self.dataset_N[at])


class Subject:
    """A model, and what is measured of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.resolve().name
        self.look = FOLDER / f"{self.name}.look"

    @cached_property
    def hub(self) -> Any:
        """The model and its tokenizer."""
        hub = megasink.load_model(self.folder, device="cpu")
        hub.model.requires_grad_(False)
        return hub

    @property
    def has_bos(self) -> bool:
        """Whether the tokenizer has a BOS, which Qwen's have not."""
        return self.hub.tokenizer.bos_token_id is not None

    def analyze(self, which: str) -> Path:
        """Return the folder of an analysis; run it if it is missing."""
        output, (texts, *flags) = self.look / which, ANALYSES[which]
        if not (output / "report.html").is_file():
            data = ("--data", *data_files(texts)) if texts else ()
            if which == "cut":
                low, high = DRAWN
                most = self.hub.model.config.get_text_config().max_position_embeddings
                flags += ["--random-lengths", str(low), str(min(high, most))]
            command("analyze", str(self.folder), *data, *flags, "--output", str(output))
        return output

    @cache  # noqa: B019  # two or three of them live, as long as the program
    def samples(self, which: str) -> Samples:
        """Return the values by text of an analysis."""
        with np.load(self.analyze(which) / "samples.npz", allow_pickle=False) as file:
            arrays = dict(file)
        sources = [Path(str(name).rpartition(":")[0]).stem for name in arrays["source"]]
        return Samples(arrays, np.array(sources))

    @cache  # noqa: B019
    def results(self, which: str) -> Any:
        """Return results.json of an analysis, read."""
        return read_analysis(self.analyze(which)).results

    def _ablate(self, name: str, *flags: str) -> AblationResults:
        output = self.look / name
        if not (output / "report.html").is_file():
            command("ablate", str(self.folder), *flags, "--output", str(output))
        return from_json(AblationResults, read_object(output / "ablation.json"), "ablation.json")

    @cached_property
    def ablation(self) -> AblationResults:
        """ablation.json: heads zeroed in each of `FEW` texts, thresholds by other texts."""
        return self._ablate(
            "ablation",
            *("--data", *data_files("few"), "--seq-length", str(TOKENS), "--bos", "none"),
            *("--calibration", str(self.analyze("scored"))),
            *("--score", *SCORES, "--zeroed", *PERCENTS, "--seeds", *"123", "--batch-size", "20"),
        )

    def ablation_point(self, key: str) -> MeasuredPoint:
        """Return a measured point of `ablation`, with the loss of each text."""
        return read_point(Store(self.look / "ablation" / "points"), key)

    @cached_property
    def on_task(self) -> AblationResults:
        """ablation.json: heads zeroed in each request of a task, thresholds by its requests."""
        questions = ("--tasks", TASK, "--limit", str(QUESTIONS), "--batch-size", "16")
        return self._ablate("task", *questions, *TASK_FLAGS)

    def right(self, point: AblationPoint) -> Floats:
        """Return [questions]: 1 where a point of `on_task` has the right answer."""
        found = read_point(Store(self.look / "task" / "points"), point.key)
        return np.array(found.tasks[TASK].of_each)

    def scores_at(self, tokens: int, *, long: bool = False) -> dict[str, Floats]:
        """Return head scores of texts of a length, one of `LENGTHS`: name -> [N, L, H]."""
        path = self.look / f"{'long' if long else 'short'}-{tokens}.npz"
        if not path.is_file():
            texts = long_texts() if long else read_texts()[:MEASURED]
            found = megasink.analyze(
                self.hub,
                [text.text for text in texts],
                seq_length=tokens,
                max_samples=None,
                bos="none",
                loss=False,
                batch_size=max(1, 1024 // tokens),
            )
            kept = {name: found.by_sample[name] for name in ("awft", "ahon_ln")}
            with told(str(path)):
                self.look.mkdir(parents=True, exist_ok=True)
                with atomic_file(path) as file:
                    np.savez_compressed(file, allow_pickle=False, **kept)
        with np.load(path, allow_pickle=False) as file:
            return dict(file)

    def sources(self) -> list[str]:
        """Return the name in `samples` of each measured text, in the order of texts.py."""
        files = {Path(path).stem: path for path in data_files("measured")}
        numbers: Counter[str] = Counter()
        names = []
        for text in read_texts()[:MEASURED]:
            numbers[text.domain] += 1
            names.append(f"{files[text.domain]}:{numbers[text.domain]}")
        return names


@cache
def long_texts() -> list[Text]:
    """Return `LONG_TEXTS` texts of code and documentation."""
    return whole_files(LONG_TEXTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Analyze models on the measured texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="Hugging Face folders")
    for folder in parser.parse_args(arguments).models:
        print(Subject(folder).analyze("text") / "report.html")
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "analyses.py")
