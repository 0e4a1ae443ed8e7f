"""Every attribute of an upstream package that megasink replaces, in one list.

`megasink info` shows it; tests/upstream breaks each of its quotations on purpose.
"""

from megasink.platform import patches
from megasink.upstream import mends, training
from megasink.upstream.register import Patch

TABLE: tuple[Patch, ...] = tuple(
    value
    for room in (patches, mends, training)
    for value in vars(room).values()
    if isinstance(value, Patch)
)
"""In the order of their rooms."""
