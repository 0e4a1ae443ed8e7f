"""Change the outputs of heads or the input tokens of a model, and measure the effect."""

from megasink.analysis.heads import heads_of, read_heads
from megasink.analysis.interventions.attention_interventions import DrainFirstValue, SteerGates
from megasink.analysis.interventions.dynamic_zeroing import DynamicChange, DynamicZeroing
from megasink.analysis.interventions.intervention_types import (
    Intervention,
    RemoveBos,
    RepeatFirstToken,
    ZeroHeads,
    from_entry,
    read_interventions,
    to_entry,
)

__all__ = [
    "DrainFirstValue",
    "DynamicChange",
    "DynamicZeroing",
    "Intervention",
    "RemoveBos",
    "RepeatFirstToken",
    "SteerGates",
    "ZeroHeads",
    "from_entry",
    "heads_of",
    "read_heads",
    "read_interventions",
    "to_entry",
]
