"""P4's derivations by Monte Carlo: the cone of values (P4.11), RMSNorm's Jacobian (P4.10).

Each check draws vectors as the derivation describes them, averages what it is about, and compares
with the closed form. The intervals are simultaneous: all of them hold together with 99%
probability if the closed forms are right.

    python examples/replicate/cone.py

Shapes: N draws, L length of the sequence, E size of a vector.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

CONFIDENCE = 0.99
DRAWS = 4000
SIZE = 64
ALPHAS = (0.2, 0.5, 0.9)
LENGTHS = (2, 4, 8, 16, 32, 64)
SCALES = (1.0, 10.0, 100.0)
STEP = 1e-3
"""Standard deviation of a perturbation's entries: so small that the first order is enough."""

Floats = NDArray[np.float64]


@dataclass(kw_only=True)
class Check:
    """A closed form, and its estimate.

    Attributes:
        what, source: what is compared, and the paper row.
        expected: the closed form; measured: the mean over `draws`.
        low, high: simultaneous 99% interval of the mean.
    """

    what: str
    source: str
    expected: float
    measured: float
    low: float
    high: float
    draws: int
    seed: int

    @property
    def holds(self) -> bool:
        """Whether the closed form lies in the interval."""
        return self.low <= self.expected <= self.high


def cone(random: np.random.Generator, alpha: float, draws: int, length: int, size: int) -> Floats:
    """Return [N, L, E]: unit vectors at the cosine `alpha` to an axis, else isotropic (Eq. 6)."""
    axis_E = np.eye(size)[0]
    side_NLE = random.standard_normal((draws, length, size))
    side_NLE[..., 0] = 0.0
    side_NLE /= np.linalg.norm(side_NLE, axis=-1, keepdims=True)
    value_NLE: Floats = alpha * axis_E + np.sqrt(1 - alpha**2) * side_NLE
    return value_NLE


def uniform_weights(random: np.random.Generator, draws: int, length: int) -> Floats:
    """Return [N, L]: a head that averages."""
    return np.full((draws, length), 1 / length)


def sparse_weights(random: np.random.Generator, draws: int, length: int) -> Floats:
    """Return [N, L]: a softmax of normal logits with a standard deviation of 2."""
    raised_NL = np.exp(2 * random.standard_normal((draws, length)))
    weight_NL: Floats = raised_NL / raised_NL.sum(-1, keepdims=True)
    return weight_NL


def cone_norm(alpha: float, square_sum: Floats) -> Floats:
    """Return E norm(c)^2 for given sums of squared weights (Eq. 10)."""
    norm: Floats = alpha**2 + (1 - alpha**2) * square_sum
    return norm


def rms_norm(x_NE: Tensor) -> Tensor:
    """Return x / r(x) with r the root mean square: no epsilon, no gain (Eq. 1, 2)."""
    return x_NE / x_NE.square().mean(-1, keepdim=True).sqrt()


def rms_jacobian(x_E: Tensor) -> Tensor:
    """Return [E, E]: I / r - x x^T / (E r^3) (Eq. 3)."""
    size = len(x_E)
    r = x_E.square().mean().sqrt()
    return torch.eye(size, dtype=x_E.dtype) / r - torch.outer(x_E, x_E) / (size * r**3)


def _sample(seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, number])


def _estimates(draws: int, seed: int) -> Iterator[tuple[str, str, float, Floats]]:
    """Yield each quantity with its source, its closed form and its draws [N]."""
    number = 0
    for alpha in ALPHAS:
        number += 1
        pair_NLE = cone(_sample(seed, number), alpha, draws, 2, SIZE)
        product_N = (pair_NLE[:, 0] * pair_NLE[:, 1]).sum(-1)
        yield f"E[v_i · v_j], alpha {alpha}", "P4 Eq. 7", alpha**2, product_N
        for kind, weights in (("uniform", uniform_weights), ("sparse", sparse_weights)):
            for length in LENGTHS:
                number += 1
                random = _sample(seed, number)
                weight_NL = weights(random, draws, length)
                value_NLE = cone(random, alpha, draws, length, SIZE)
                norm_N = ((weight_NL[..., None] * value_NLE).sum(1) ** 2).sum(-1)
                # The weights are drawn, too: the closed form is that of their own squares.
                square_sum_N = (weight_NL**2).sum(-1)
                closed = float(cone_norm(alpha, square_sum_N).mean())
                drawn_N = norm_N - cone_norm(alpha, square_sum_N) + closed
                what = f"E norm(c)², alpha {alpha}, {kind} weights over {length}"
                yield what, "P4 Eq. 11", closed, drawn_N
    for scale in SCALES:
        number += 1
        random = _sample(seed, number)
        x_NE = torch.from_numpy(scale * random.standard_normal((draws, SIZE)))
        step_NE = STEP * torch.from_numpy(random.standard_normal((draws, SIZE)))
        changed_N = (rms_norm(x_NE + step_NE) - rms_norm(x_NE)).square().sum(-1) / STEP**2
        # The SIZE - 1 components of d across x, each over r (Eq. 5); r^2 of normal entries is
        # scale^2 chi^2 / SIZE, whose inverse has the mean SIZE / (scale^2 (SIZE - 2)).
        closed = (SIZE - 1) * SIZE / (scale**2 * (SIZE - 2))
        what = f"E norm(Norm(x + d) - Norm(x))² / E d_i², entries of x of size {scale:g}"
        yield what, "P4 Eq. 5", closed, changed_N.numpy()


def checks(draws: int = DRAWS, seed: int = 1) -> list[Check]:
    """Return every check; 11 s of CPU time for 4000 draws."""
    found = list(_estimates(draws, seed))
    z = float(stats.norm.ppf(1 - (1 - CONFIDENCE) / (2 * len(found))))
    made = []
    for what, source, expected, drawn_N in found:
        error = z * float(drawn_N.std(ddof=1)) / np.sqrt(len(drawn_N))
        mean = float(drawn_N.mean())
        # Float64 sums differ in their last digits where nothing is random.
        low, high = mean - error - 1e-12, mean + error + 1e-12
        made.append(
            Check(
                what=what,
                source=source,
                expected=expected,
                measured=mean,
                low=low,
                high=high,
                draws=draws,
                seed=seed,
            )
        )
    return made


@dataclass(kw_only=True)
class Fit:
    """The cone model against measured norms of attention outputs, by position.

    norm(c_t)^2 = scale^2 (alpha^2 + (1 - alpha^2) q_t) with q_t the sum of squared weights of row
    t, by least squares over positions.

    Attributes:
        alpha: NaN where the line has a negative intercept or slope, which no cone has.
        r2: share of the variance of norm^2 over positions that the line explains.
        tau: Kendall's rank correlation of norm and q_t.
        first_over_later: norm of position 0 over the mean of the later ones (P4.12: 0.87 / 0.59).
    """

    alpha: float
    scale: float
    r2: float
    tau: float
    first_over_later: float


def fit(square_sum_P: Floats, norm_P: Floats) -> Fit:
    """Fit the cone model to a layer, by position.

    Raises:
        ValueError: fewer than three positions.
    """
    if len(norm_P) < 3:
        raise ValueError(f"{len(norm_P)} positions: the fit takes 3 or more")
    line = stats.linregress(square_sum_P, norm_P**2)
    total = line.intercept + line.slope  # scale^2
    share = line.intercept / total if total else np.nan
    return Fit(
        alpha=float(np.sqrt(share)) if 0 <= share <= 1 else float("nan"),
        scale=float(np.sqrt(total)) if total >= 0 else float("nan"),
        r2=float(line.rvalue**2),
        tau=float(stats.kendalltau(square_sum_P, norm_P).statistic),
        first_over_later=float(norm_P[0] / norm_P[1:].mean()),
    )


def main() -> int:
    """Print the checks; return 1 if a closed form is outside its interval."""
    made = checks()
    for check in made:
        print(
            f"{check.what:70} {check.expected:9.5f}  measured {check.measured:9.5f} "
            f"({check.low:.5f} to {check.high:.5f})  {'holds' if check.holds else 'FAILS'}"
        )
    return int(not all(check.holds for check in made))


if __name__ == "__main__":
    sys.exit(main())
