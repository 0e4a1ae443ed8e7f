"""Scores of heads on texts that no loss is measured on: importance, P3's scores, gradients.

    python -m examples.real_models.scores runs/real-models/smollm2 runs/real-models/gemma3

writes runs/real-models/scores-NAME.json. What exists already is left.

Shapes: L layers, H heads.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import megasink
from examples.real_models.texts import MEASURED, read_texts
from examples.real_models.wheels import FOLDER, told
from examples.real_models.zeroing import TOKENS, samples_of
from megasink.analysis.capture.input_samples import data_hash, inputs_of
from megasink.analysis.capture.probed_models import of_transformers
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.run_analysis import analyze
from megasink.attention.constants import BACKWARD_SCORES
from megasink.files.atomic import atomic_text
from megasink.transformers.model_identity import weights_hash

SIX = ("awft", "aeqd", "ftvvn", "avvn", "lthon", "ahon")
"""P3's scores; each also divided by its layer's mean (LN), which makes twelve."""
MEASURES = (
    "importance",
    *(f"{name}{form}" for form in ("", "_ln") for name in SIX),
    *("lthon_hn", "circuit_ahon", "circuit_ahon_ln"),
)


def scores_of(hub: Any) -> dict[str, Any]:
    """Return every score, [layers][heads], and what it was measured on."""
    texts, samples = read_texts()[MEASURED:], samples_of(hub.tokenizer)[MEASURED:]
    model = of_transformers(hub.model, hub.tokenizer, hub.name)
    options = AnalysisOptions(seq_length=TOKENS, max_samples=None, metrics=BACKWARD_SCORES)
    inputs = inputs_of(options, model, [text.text for text in texts])
    found = analyze(model, options, inputs=inputs)
    assert found is not None  # one process
    scores = {name: found[name].values for name in MEASURES}
    scores |= {f"mask_{name}": found[name].values for name in BACKWARD_SCORES}
    return {
        "weights": weights_hash(hub.model),
        "texts": data_hash(samples),
        "tokens": TOKENS,
        "scores": {name: _rounded(values) for name, values in scores.items()},
    }


def _rounded(values_LH: Any) -> list[list[float]]:
    return [[float(f"{value:.5g}") for value in row] for row in np.asarray(values_LH)]


def write_scores(folder: Path) -> Path:
    """Write the scores of a model's heads, if they are missing."""
    path = FOLDER / f"scores-{folder.resolve().name}.json"
    if not path.is_file():
        found = scores_of(megasink.load_model(folder, device="cpu"))
        with told(str(path)):
            atomic_text(path, json.dumps(found, separators=(",", ":")) + "\n")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the scores of models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="Hugging Face folders")
    for folder in parser.parse_args(arguments).models:
        print(write_scores(folder))
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "scores.py")
