"""The list of all upstream attributes that megasink replaces.

`megasink doctor` shows it; tests/upstream breaks each of its quotes on purpose.
"""

from megasink.cpu import patches
from megasink.upstream import fixes, muon_patch, needless_copies, training_patches
from megasink.upstream.patch_register import Patch

TABLE: tuple[Patch, ...] = tuple(
    value
    for room in (patches, fixes, needless_copies, muon_patch, training_patches)
    for value in vars(room).values()
    if isinstance(value, Patch)
)
"""All patches, ordered by module."""
