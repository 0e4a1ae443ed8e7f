"""The attention sink with each head of layer 0 zeroed alone, and with all of them zeroed (P4.7).

P4 asks by t-SNE whether one head of layer 0 makes the first token stand out; this asks for the sink
itself. `megasink ablate --layer 0` draws the t-SNE, and measures the loss.

    python examples/replicate/first_layer.py RUN --data TEXT --output OUT
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megasink.analysis.capture.input_samples import Sample, inputs_of
from megasink.analysis.capture.probe import ProbedModel
from megasink.analysis.interventions.intervention_types import ZeroHeads, changes_of
from megasink.analysis.measure import measure
from megasink.analysis.open_model import opened
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.ranks import Ranks
from megasink.cli.analyze import analyze_parser, check
from megasink.console.progress import tracked
from megasink.files.atomic import atomic_text
from megasink.files.json_file import read_object

FILE = "first_layer.json"
UNCHANGED, ALL = "unchanged", "all"
NUMBERS = ("sink_rate", "least_sink_rate", "least_share", "all_share")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure Sink^0.3 of the first token with heads of layer 0 zeroed; write first_layer.json."""
    args = analyze_parser("first_layer.py", main.__doc__).parse_args(argv)
    which, options = check(args)
    with opened(which, Ranks()) as model:
        write(model, options, args.output)
    return 0


def write(model: ProbedModel, options: AnalysisOptions, output: Path) -> None:
    """Measure a loaded model and write first_layer.json."""
    samples = inputs_of(options, model).samples
    heads = range(model.heads[0])
    settings: dict[str, list[tuple[int, int]]] = {UNCHANGED: []}
    settings |= {f"0.{head}": [(0, head)] for head in heads} | {ALL: [(0, head) for head in heads]}
    console = Console(stderr=True)
    found = {
        label: sink_rate(model, samples, zeroed, options.batch_size, options.seed)
        for label, zeroed in tracked(
            settings.items(), "layer 0", len(settings), "settings", console=console
        )
    }
    output.mkdir(parents=True, exist_ok=True)
    atomic_text(output / FILE, json.dumps({"sink_rate": found}, indent=1) + "\n")
    print(f"wrote {output / FILE}")


def sink_rate(
    model: ProbedModel,
    samples: Sequence[Sample],
    zeroed: list[tuple[int, int]],
    batch_size: int,
    seed: int = 0,
) -> float:
    """Return Sink^0.3 of the first token over all heads, with some of them zeroed."""
    measured = measure(
        model,
        samples,
        AnalysisOptions(batch_size=batch_size, positions=1, columns=1, loss=False),
        changes=changes_of([ZeroHeads(zeroed)] if zeroed else []),
        console=Console(quiet=True),
    )
    assert measured is not None  # one process
    return float(measured.analysis_values(seed).overall["sink_rate"][0])


def read(folder: Path) -> dict[str, float | None]:
    """Return the numbers of a finished measurement.

    The shares are of the unchanged rate: the lowest one with one head zeroed, and that with all
    heads zeroed; None where the unchanged model has no sink.
    """
    rates = read_object(folder / FILE)["sink_rate"]
    unchanged, every = rates[UNCHANGED], rates[ALL]
    least = min(rate for label, rate in rates.items() if label not in (UNCHANGED, ALL))
    shares = (least / unchanged, every / unchanged) if unchanged else (None, None)
    return dict(zip(NUMBERS, (unchanged, least, *shares), strict=True))


if __name__ == "__main__":
    sys.exit(main())
