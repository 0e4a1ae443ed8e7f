"""P3's scores of inactive heads: six definitions, and the circuit-based output norms.

A head of a sequence is inactive if its score is below a threshold, or above for first tokens.

Shapes: H query heads, G key/value groups, T tokens, D head dim, E hidden size.
"""

import math
from functools import partial

import torch
from torch import Tensor

from megasink.analysis.metrics.registry import metric

POSITIVE = (0.0, math.inf)
SHARE = (0.0, 1.0)

score = partial(metric, unit="L2 norm", axis="head", inactive="below", bounds=POSITIVE)
of_scores = partial(score, unit="1", over_samples="mean", shown=())


def per_query_head(values_G: Tensor, heads: int) -> Tensor:
    """Return [H]: each group's value repeated for its query heads."""
    return values_G.repeat_interleave(heads // len(values_G))


@score(
    "awft",
    source="P3.1, P0.28 (Eq. 9), P2.1",
    unit="1",
    inactive="above",
    bounds=SHARE,
    shown=("table", "wasserstein"),
    title="AWFT",
)
def average_weight_of_first_token(first_weight_HT: Tensor) -> Tensor:
    """AWFT: mean over queries of the weight on the first token, row 0 (weight 1) included."""
    return first_weight_HT.mean(-1)


@score("aeqd", source="P3.2", unit="nats", title="AEQD")
def average_entropy(entropy_HT: Tensor) -> Tensor:
    """AEQD: mean over queries of the entropy of the attention row; a sink is one more outcome."""
    return entropy_HT.mean(-1)


@score("ftvvn", source="P3.3", title="FTVVN")
def first_value_norm(value_GTD: Tensor, out_HTD: Tensor) -> Tensor:
    """FTVVN: norm of the first token's value; equal for the query heads of a group."""
    return per_query_head(value_GTD[:, 0].norm(dim=-1), len(out_HTD))


@score("avvn", source="P3.4", title="AVVN")
def average_value_norm(value_GTD: Tensor, out_HTD: Tensor) -> Tensor:
    """AVVN: mean over tokens of the value's norm; equal for the query heads of a group."""
    return per_query_head(value_GTD.norm(dim=-1).mean(-1), len(out_HTD))


@score("lthon", source="P3.5", title="LTHON")
def last_output_norm(gated_out_HTD: Tensor) -> Tensor:
    """LTHON: norm of the head's output at the last real token."""
    return gated_out_HTD[:, -1].norm(dim=-1)


@score("ahon", source="P3.6", title="AHON")
def average_output_norm(gated_out_HTD: Tensor) -> Tensor:
    """AHON: mean over tokens of the norm of the head's output, after a gate, before W_O."""
    return gated_out_HTD.norm(dim=-1).mean(-1)


@score("circuit_ahon", source="P3.10", title="circuit AHON")
def average_circuit_norm(gated_out_HTD: Tensor, output_weight_HDE: Tensor) -> Tensor:
    """Circuit-based AHON: mean over tokens of the norm of z_i W_O^(h)."""
    weight_HDE = output_weight_HDE.to(gated_out_HTD.dtype)
    gram_HDD = weight_HDE @ weight_HDE.transpose(-1, -2)  # so that nothing is [H, T, E]
    square_HT = ((gated_out_HTD @ gram_HDD) * gated_out_HTD).sum(-1)
    return square_HT.clamp_(min=0.0).sqrt_().mean(-1)


def layer_normalized(scores_NLH: Tensor) -> Tensor:
    """The (LN) form of a score: divided by its layer's mean, this head included."""
    return scores_NLH / scores_NLH.nanmean(-1, keepdim=True)


@of_scores("lthon_hn", source="P3.8", title="LTHON (HN)")
def own_average_normalized(lthon_NLH: Tensor, ahon_NLH: Tensor) -> Tensor:
    """LTHON(HN): the last token's output norm over the head's own average."""
    return lthon_NLH / ahon_NLH


def random_scores(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return uniform scores in [0, 1): the random baseline (P3.9). float64, as bf16 is coarse."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


for _score, _inactive in (
    ("awft", "above"),
    *((name, "below") for name in ("aeqd", "ftvvn", "avvn", "lthon", "ahon", "circuit_ahon")),
):
    of_scores(
        f"{_score}_ln",
        source="P3.7 (Eq. 1)",
        shown=("wasserstein",) if _score == "ahon" else (),
        title={"circuit_ahon": "circuit AHON"}.get(_score, _score.upper()) + " (LN)",
        inactive=_inactive,
        needs=(f"{_score}_NLH",),
    )(layer_normalized)


@of_scores("random", source="P3.9", title="random score", bounds=SHARE)
def random_baseline(awft_NLH: Tensor, seed: int) -> Tensor:
    """Uniform in [0, 1), by the analysis's seed: the random baseline."""
    return random_scores(tuple(awft_NLH.shape), seed).masked_fill(awft_NLH.isnan(), torch.nan)
