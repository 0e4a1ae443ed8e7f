"""Change the outputs of heads or the input tokens of a model, and measure the effect."""

from megasink.analysis.heads import heads_of, read_heads
from megasink.analysis.interventions.dynamic_zeroing import DynamicChange, DynamicZeroing
from megasink.analysis.interventions.kinds import (
    Intervention,
    RemoveBos,
    RepeatFirstToken,
    ZeroHeads,
    from_entry,
    read_interventions,
    to_entry,
)
from megasink.analysis.interventions.on_attention import DrainFirstValue, SteerGates

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
