"""From statistics of attention, values and states to the scores of the papers.

Pure functions on torch and numpy; `registry` says what they may take.
"""

from megasink.diagnostics.registry import (
    AXES,
    STATISTICS,
    Metric,
    metric,
    metrics,
    metrics_shown,
)

__all__ = ["AXES", "STATISTICS", "Metric", "metric", "metrics", "metrics_shown"]
