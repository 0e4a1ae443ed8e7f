"""Compute the papers' scores from statistics of attention, values and states.

All are pure functions on torch and numpy; `registry` defines their inputs.
"""

from megasink.analysis.metrics.registry import (
    AXES,
    STATISTICS,
    Metric,
    metric,
    metrics,
    metrics_shown,
)

__all__ = ["AXES", "STATISTICS", "Metric", "metric", "metrics", "metrics_shown"]
