"""Identity of an analysis, so that only parts of the same one are combined."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from megasink.analysis.capture.inputs import Sample, data_hash
from megasink.analysis.metrics.registry import measured
from megasink.analysis.options import AnalysisOptions
from megasink.transformers.identity import model_identity

if TYPE_CHECKING:
    from megasink.analysis.capture.base import ProbedModel


def identity(model: "ProbedModel", data: Any, **settings: Any) -> dict[str, Any]:
    """Return the identity of a measurement: every setting that can change a bit of the results."""
    return {
        "model": model.facts["kind"],
        **model_identity(model.module, model.tokenizer, data),
        "dtype": model.facts["dtype"],
        "attention": model.facts["attention"],
        "device": model.device.type,
        **settings,
    }


def analysis_identity(
    model: "ProbedModel",
    samples: Sequence[Sample],
    options: AnalysisOptions,
    metrics: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Return the identity of metrics of samples."""
    flags = options.by_flag("data", "batch_size", "positions", "columns", "loss")
    names = sorted(measured(metrics, options.metrics))
    return identity(model, data_hash(samples), **flags, metrics=names)
