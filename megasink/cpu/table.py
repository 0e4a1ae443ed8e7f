"""The list of all upstream attributes that megasink replaces.

`megasink doctor` shows it; tests/upstream breaks each of its quotes on purpose.
"""

from megasink.cpu import patches
from megasink.upstream import copies, fixes, muon, training
from megasink.upstream.register import Patch

TABLE: tuple[Patch, ...] = tuple(
    value
    for room in (patches, fixes, copies, muon, training)
    for value in vars(room).values()
    if isinstance(value, Patch)
)
"""All patches, ordered by module."""
