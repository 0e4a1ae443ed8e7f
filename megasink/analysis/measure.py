"""Measure a model: samples through a probe, metrics of what it catches, shards that can be resumed.

Every instrument measures by this, in one call.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.changes import HeadChange
from megasink.analysis.capture.inputs import Sample
from megasink.analysis.capture.measurements import Measurements
from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.capture.recorder import Recorder
from megasink.analysis.capture.run import run
from megasink.analysis.capture.shards import PartialFolder
from megasink.analysis.options import AnalysisOptions


def measure(
    model: ProbedModel,
    samples: Sequence[Sample],
    options: AnalysisOptions,
    metrics: Iterable[str] | None = None,
    *,
    changes: Sequence[HeadChange] = (),
    token_bytes: NDArray[np.int32] | None = None,
    partial: PartialFolder | None = None,
    ranks: Ranks | None = None,
    console: Console | None = None,
) -> Measurements | None:
    """Run the samples and return the metrics of each; see `run`.

    Args:
        metrics: metrics of statistics to compute; None for all.
        changes: made in the heads while they run.
    """
    recorder = Recorder(model.heads, metrics, options)
    with model.open_probe(recorder, changes) as probe:
        return run(
            probe,
            recorder,
            samples,
            options,
            device=model.device,
            token_bytes=token_bytes,
            console=console,
            partial=partial,
            ranks=ranks,
        )
