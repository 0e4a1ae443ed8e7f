"""What the tests of `megasink ablate` on texts share: a model, two datasets, the command."""

import json
from pathlib import Path
from typing import Any

from megasink.analysis.ablate.results import AblationResults
from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.typed_json import from_json
from tests.analysis.capture.tiny_models import save_with_tokenizer

TEXTS = [
    "Zeroed heads write nothing, and what a model loses by it says what they wrote before.",
    "Random heads are the baseline: they cost the most of all heads that are zeroed here.",
    "Short, but not empty.",
]
PERCENTS = (0, 10, 30)
HEADS, LENGTH = 4, 14


def make_folder(root: Path) -> Path:
    """A model, and two datasets."""
    save_with_tokenizer(root, "llama", TEXTS, tokens=330)
    for name, texts in (("first", TEXTS[:2]), ("second", TEXTS[2:])):
        lines = "".join(json.dumps({"text": t}) + "\n" for t in texts)
        (root / f"{name}.jsonl").write_text(lines)
    return root


def command(folder: Path, output: Path, *flags: str) -> list[str]:
    """Two samples of one dataset and one of another."""
    texts = f"{folder}/first.jsonl {folder}/second.jsonl"
    base = f"ablate {folder}/llama --data {texts} --output {output} --device cpu"
    base += f" --seq-length {LENGTH}"
    if "--score" in flags or not {"--heads", "--layer", "--interventions"} & set(flags):
        base += f" --zeroed {' '.join(map(str, PERCENTS))} --seeds 4 5"
    return [*base.split(), *flags]


def results_of(output: Path) -> AblationResults:
    content = json.loads((output / "ablation.json").read_text())
    results: AblationResults = from_json(AblationResults, content, "it")
    return results


def count_forwards(monkeypatch: Any) -> list[Any]:
    """The calls of the model from now on."""
    forward, calls = TransformersProbe.forward, []

    def counted(probe: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return forward(probe, *args, **kwargs)

    monkeypatch.setattr(TransformersProbe, "forward", counted)
    return calls
