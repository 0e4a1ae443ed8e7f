"""Points in a plane: PCA of queries, keys, maps and states, and t-SNE.

Shapes: T tokens, D head dim, M matrices, C components.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

Floats = NDArray[np.float64]


class Components(NamedTuple):
    """The first principal components of some rows; directions have a positive largest entry."""

    points: Floats  # [rows, count] coordinates
    explained: Floats  # [count] shares of the variance


def principal_components(rows: Floats, count: int = 2) -> Components:
    """Return the PCA of centered rows."""
    from sklearn.decomposition import PCA  # slow import, needed only for points

    if len(rows) < 2:
        raise ValueError(f"principal components of {len(rows)} row: two or more are needed")
    if not np.ptp(rows, axis=0).any():
        raise ValueError("all rows are equal, so they have no principal components")
    pca = PCA(min(count, *rows.shape), svd_solver="full")
    return Components(pca.fit_transform(rows), pca.explained_variance_ratio_)


def query_key_components(query_TD: Floats, key_TD: Floats) -> tuple[Floats, Floats, Floats]:
    """Return 2 components of a head's queries and keys, in one fit (P0.26), and their shares."""
    points, explained = principal_components(np.concatenate([query_TD, key_TD]))
    return points[: len(query_TD)], points[len(query_TD) :], explained


class MapComponents(NamedTuple):
    """The first principal components of the attention matrices of one input."""

    points_MC: Floats  # coordinates of each matrix
    explained_C: Floats  # shares of the variance
    images_CTT: Floats  # directions of norm 1, as matrices, with a positive largest entry


def attention_map_components(maps_MTT: NDArray[Any], count: int = 2) -> MapComponents:
    """Return the PCA of flattened attention matrices, minus the mean matrix (P3.27)."""
    matrices = len(maps_MTT)
    if matrices < 2:
        raise ValueError(f"principal components of {matrices} matrix: two or more are needed")
    rows = maps_MTT.reshape(matrices, -1)
    # The [M, M] Gram matrix, centered afterwards: scikit-learn copies the [M, T * T] matrices.
    inner_MM = (rows @ rows.T).astype(np.float64)
    mean_M = inner_MM.mean(0)
    inner_MM += mean_M.mean() - mean_M[:, None] - mean_M
    total, count = float(np.trace(inner_MM)), min(count, matrices - 1)
    # Centered products are differences: equal matrices leave only rounding errors.
    if not total > 1e-6 * float(np.square(rows, dtype=np.float64).sum()):
        raise ValueError("all matrices are equal, so they have no principal components")
    values, vectors = eigh(inner_MM, subset_by_index=[matrices - count, matrices - 1])
    scale = np.sqrt(np.maximum(values[::-1], 0.0))
    vectors_MC = vectors[:, ::-1]
    images = (vectors_MC - vectors_MC.mean(0)).T @ rows / np.maximum(scale, 1e-30)[:, None]
    sign = np.sign(images[np.arange(count), np.abs(images).argmax(1)])
    return MapComponents(
        vectors_MC * scale * sign,
        scale**2 / total,
        (images * sign[:, None]).reshape(count, *maps_MTT.shape[1:]),
    )


PERPLEXITY = 30.0
"""Perplexity of t-SNE if there are enough rows: scikit-learn's default (the paper gives none)."""

FEWEST = 8
"""Minimum number of rows for t-SNE: with fewer there is no neighborhood to preserve."""


class Embedding(NamedTuple):
    """t-SNE of some rows."""

    points: Floats  # [rows, 2]; distances within a cluster mean something, axes and signs nothing
    perplexity: float  # the perplexity used
    divergence: float  # final Kullback-Leibler divergence; nats


def neighbor_embedding(rows: Floats, seed: int) -> Embedding:
    """Return the exact t-SNE of rows [N, features], from their PCA (P4.6), in O(N^2)."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if len(rows) < FEWEST:
        raise ValueError(f"t-SNE of {len(rows)} rows: {FEWEST} or more are needed")
    if not np.ptp(rows, axis=0).any():
        raise ValueError("t-SNE needs rows that differ, but all are equal")
    perplexity = min(PERPLEXITY, (len(rows) - 1) / 3)
    # Exact, as the tree approximation fails for equal rows, which first tokens may have.
    options = {"perplexity": perplexity, "random_state": seed, "init": "pca", "method": "exact"}
    with threadpool_limits(1):  # its threads spin, and slow it down many times on busy cores
        fitted = TSNE(2, **options, n_jobs=1).fit(rows)
    points = fitted.embedding_.astype(np.float64)
    return Embedding(points, perplexity, float(fitted.kl_divergence_))
