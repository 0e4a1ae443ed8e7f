"""The architectures of exports: those of transformers, and megasink's own.

Each file registers some of them, as a plugin does. A new file is imported here.
"""

from megasink.convert.targets.target import Target
from megasink.convert.targets.target_registry import TARGETS, choose, named, register

# isort: split
# They import the names above, as a plugin does.
from megasink.convert.targets import (
    deepseek,
    gated_attention,
    megasink,
    sink_attention,
    softmax_attention,
    softmax_families,
    softmax_multipliers,
)

__all__ = [
    "TARGETS",
    "Target",
    "choose",
    "deepseek",
    "gated_attention",
    "megasink",
    "named",
    "register",
    "sink_attention",
    "softmax_attention",
    "softmax_families",
    "softmax_multipliers",
]
