"""Change what a model's heads write, or which tokens it reads, and see what that costs."""

from megasink.analysis.interventions.drain_first_value import DrainFirstValue
from megasink.analysis.interventions.dynamic_zeroing import DynamicChange, DynamicZeroing
from megasink.analysis.interventions.heads import all_but, all_heads, parse_heads, read_heads
from megasink.analysis.interventions.mean_outputs import MeanOutputs, mean_outputs, read_means
from megasink.analysis.interventions.record import (
    KINDS,
    Intervention,
    from_entry,
    read_interventions,
    to_entry,
)
from megasink.analysis.interventions.steer_gates import SteerGates
from megasink.analysis.interventions.tokens import RemoveBos, RepeatFirstToken
from megasink.analysis.interventions.zero_heads import ZeroHeads

__all__ = [
    "KINDS",
    "DrainFirstValue",
    "DynamicChange",
    "DynamicZeroing",
    "Intervention",
    "MeanOutputs",
    "RemoveBos",
    "RepeatFirstToken",
    "SteerGates",
    "ZeroHeads",
    "all_but",
    "all_heads",
    "from_entry",
    "mean_outputs",
    "parse_heads",
    "read_heads",
    "read_interventions",
    "read_means",
    "to_entry",
]
