"""Read MXFP4 weights: blocks of 32 numbers of four bits, with a shared exponent (GPT-OSS).

A weight NAME is two tensors of bytes, NAME_blocks [E, R, G, 16], two numbers a byte, the lower half
first, and NAME_scales [E, R, G]. Unpacked it is [E, G * 32, R], as transformers stores it.

Shapes: E experts, R rows, G blocks of a row.
"""

import torch
from torch import Tensor

from megasink.errors import UserError

BLOCKS, SCALES = "_blocks", "_scales"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the exponent


def packed_names(names: frozenset[str]) -> frozenset[str]:
    """Return the weights of which `names` has both tensors."""
    found = {name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS)}
    return frozenset(name for name in found if name + SCALES in names)


def unpacked_shape(name: str, blocks: list[int], scales: list[int]) -> list[int]:
    """Return the shape of a weight, given those of its two tensors."""
    if len(blocks) != 4 or blocks[3] != 16 or blocks[:3] != scales:
        raise UserError(
            f"{name}{BLOCKS} {blocks} and {name}{SCALES} {scales} do not match: MXFP4 needs "
            "[experts, rows, blocks, 16] and [experts, rows, blocks]"
        )
    experts, rows, count, _ = blocks
    return [experts, count * 32, rows]


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of a weight in bfloat16, which holds them exactly."""
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), dtype=torch.bfloat16)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    numbers = values[halves.int()]
    exponents = (scales.int() - _BIAS)[..., None]
    return torch.ldexp(numbers, exponents).flatten(2).transpose(1, 2)
