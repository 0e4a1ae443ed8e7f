"""The architectures that a model can become: transformers' own, and that of our modelling file.

Each file registers some of them, as a plugin's does. A new file is imported here.
"""

from megasink.convert.targets.registry import TARGETS, choose, named, register
from megasink.convert.targets.target import Target

# isort: split
# They import what stands above, as a plugin does.
from megasink.convert.targets import gated_attention, megasink, sink_attention, softmax_attention

__all__ = [
    "TARGETS",
    "Target",
    "choose",
    "gated_attention",
    "megasink",
    "named",
    "register",
    "sink_attention",
    "softmax_attention",
]
