"""Distance biases as diagonals of the scores: z_ij = scale * q_i . k_j + b(i - j).

The bias is constant along a diagonal of each head. A chunk of C rows over K keys needs C + K - 1
biases, viewed as a C x K matrix through overlapping strides, and their gradient is dS summed along
the diagonals. Hidden keys (distances below 0 or outside the window) have a bias of -inf.

Shapes: H query heads, G groups, R heads per group, S keys, C rows of a chunk, K keys visible to it,
X = S + CHUNK - 1 distances S - 1, .., 0, -1, ...
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def reversed_bias(distance_bias_HS: Tensor, groups: int, window: int | None, chunk: int) -> Tensor:
    """Return biases [G, R, X] by decreasing distance, -inf if hidden, for up to `chunk` rows."""
    bias_HS = distance_bias_HS
    if window is not None and window < bias_HS.shape[1]:
        bias_HS = pad(bias_HS[:, :window], (0, bias_HS.shape[1] - window), value=-torch.inf)
    reversed_HX = pad(bias_HS.flip(-1), (0, chunk - 1), value=-torch.inf)
    return reversed_HX.unflatten(0, (groups, -1))


def diagonals(rows: slice, keys: slice, past: int, total: int) -> slice:
    """Return the slice of X with the C + K - 1 distances of a chunk after `past` keys."""
    largest = past + rows.stop - 1 - keys.start
    return slice(total - 1 - largest, total - 1 + rows.stop - rows.start)


def as_matrix(bias_GRX: Tensor, keys: int) -> Tensor:
    """View C + K - 1 biases as [G, R, C, K]: window r of K neighbors is row r from the bottom."""
    return bias_GRX.unfold(-1, keys, 1).flip(-2)


def diagonal_sums(matrix_GRCK: Tensor) -> Tensor:
    """Sum along diagonals, the transpose of `as_matrix`: [G, R, C + K - 1]."""
    rows, columns = matrix_GRCK.shape[-2:]
    # Reshaped to one column less, rows of C + K columns shift by one from each row to the next.
    padded = pad(matrix_GRCK.flip(-2), (0, rows)).flatten(-2)
    return padded[..., : rows * (rows + columns - 1)].unflatten(-1, (rows, -1)).sum(-2)
