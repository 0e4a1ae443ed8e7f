"""Of what a weight consists in a checkpoint of any format."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from megasink.checkpoint.stored_tensor import StoredTensor


class Part(NamedTuple):
    """A box of a weight.

    Attributes:
        offsets, sizes: of the box, axes of layers and experts included.
        find: where its bytes are; raises anything where they are broken. Its shape may lack
            leading axes of size one.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    find: Callable[[], StoredTensor]


class Weight(NamedTuple):
    """A weight of the model.

    Attributes:
        shape, dtype: of it, axes of layers and experts included.
        parts: that cover it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part]
