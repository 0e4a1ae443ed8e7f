"""Points in a plane: principal components of queries, keys, maps and states, and t-SNE.

Shapes: T tokens, D head dim, M matrices.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAP_TOKENS = 512
"""The longest sequence whose attention maps are made: they are S x S."""


class Components(NamedTuple):
    """The first principal components of some rows.

    Attributes:
        points: [rows, count] coordinates. The sign of an axis is set so that the entry of largest
            magnitude in its direction is positive.
        explained: [count] shares of the variance.
    """

    points: Floats
    explained: Floats


def principal_components(rows: Floats, count: int = 2) -> Components:
    """PCA of centred rows.

    Raises:
        ValueError: fewer than two rows, or rows that are all equal.
    """
    if len(rows) < 2:
        raise ValueError(f"principal components of {len(rows)} row: two or more are needed")
    centred = rows - rows.mean(0)
    u, s, vt = np.linalg.svd(centred, full_matrices=False)
    if not s[0] > 0:
        raise ValueError("principal components of rows that are all equal")
    count = min(count, len(s))
    sign = np.sign(vt[np.arange(count), np.abs(vt[:count]).argmax(1)])
    return Components(u[:, :count] * s[:count] * sign, (s**2 / (s**2).sum())[:count])


def query_key_components(query_TD: Floats, key_TD: Floats) -> tuple[Floats, Floats, Floats]:
    """Joint PCA of one head's queries and keys, after rotary embeddings (P0.26).

    One fit on both, centred at their common mean, so that distances compare.

    Returns:
        points of the queries [T, 2] and of the keys [T, 2], whose first row is k_0, and the
        explained shares [2].
    """
    points, explained = principal_components(np.concatenate([query_TD, key_TD]))
    return points[: len(query_TD)], points[len(query_TD) :], explained


def attention_map_components(maps_MTT: Floats) -> Components:
    """PCA over attention matrices, each one flattened, of one input (P3.27).

    Raises:
        ValueError: matrices of more than `MAP_TOKENS` tokens.
    """
    if maps_MTT.shape[-1] > MAP_TOKENS:
        raise ValueError(
            f"attention maps of {maps_MTT.shape[-1]} tokens: at most {MAP_TOKENS}, they are S x S"
        )
    return principal_components(maps_MTT.reshape(len(maps_MTT), -1))


PERPLEXITY = 30.0
"""Of t-SNE where there are rows enough; scikit-learn's default, the paper gives none."""

FEWEST = 8
"""Rows that t-SNE needs here: with fewer there is no neighbourhood to keep."""


class Embedding(NamedTuple):
    """What t-SNE made of some rows.

    Attributes:
        points: [rows, 2]; distances within a cluster mean something, axes and signs nothing.
        perplexity: that was used.
        divergence: Kullback-Leibler divergence that is left; nats.
    """

    points: Floats
    perplexity: float
    divergence: float


def neighbour_embedding(rows: Floats, seed: int) -> Embedding:
    """t-SNE of some rows by scikit-learn (P4.6), exact, from their principal components.

    Args:
        rows: [rows, features]; time grows with the square of their number.
        seed: of scikit-learn; the same rows and seed give the same points on one machine.

    Raises:
        ValueError: fewer than `FEWEST` rows, or rows that are all equal.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if len(rows) < FEWEST:
        raise ValueError(f"t-SNE of {len(rows)} rows: {FEWEST} or more are needed")
    if not np.ptp(rows, axis=0).any():
        raise ValueError("t-SNE of rows that are all equal")
    perplexity = min(PERPLEXITY, (len(rows) - 1) / 3)
    # Exact: the tree of the approximation goes wrong where rows are equal, as first tokens may be.
    options = {"perplexity": perplexity, "random_state": seed, "init": "pca", "method": "exact"}
    with threadpool_limits(1):  # its threads spin: with fewer idle cores it takes many times longer
        fitted = TSNE(2, **options, n_jobs=1).fit(rows)
    points = fitted.embedding_.astype(np.float64)
    return Embedding(points, perplexity, float(fitted.kl_divergence_))
