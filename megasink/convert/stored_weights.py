"""The parts of a stored weight."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from megasink.checkpoints.stored_tensor import StoredTensor


class Part(NamedTuple):
    """A box of a weight.

    Attributes:
        offsets, sizes: of the box, including the axes of layers and experts.
        find: locates the data, which may lack leading axes of size one; raises exceptions of any
            type if the data is corrupt.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    find: Callable[[], StoredTensor]


class Weight(NamedTuple):
    """A weight of the model.

    Attributes:
        shape, dtype: of the whole weight, including the axes of layers and experts.
        parts: boxes that cover it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part]
