"""The share of attention on the first key, by which attention sinks are counted (P2.1, P2.2).

Shapes: B batch, H query heads, G key/value groups, T queries, S keys, D head dim.
"""

import torch
from torch import Tensor

from megasink.attention.layout import repeat_groups, row_dot


@torch.no_grad()
def first_key_share(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    lse_BHT: Tensor,
    tokens: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    distance_bias_HS: Tensor | None = None,
) -> Tensor:
    """alpha_1: the mean over the first `tokens` queries of their weight on key 0 (P2.1, k = 1).

    From the LSE that the kernel returned: A_i0 = exp(z_i0 - LSE_i). A causal row does not see what
    comes after it, so the first rows of a long sequence are those of a sequence that short. The
    first row, whose weight is 1 where there is no sink beside the keys, counts: alpha_1 is at least
    1 / tokens there.

    Args:
        query_BHTD, key_BGSD: as given to `attention`, T = S, of one document each.
        lse_BHT: as returned by it, the sink included where there is one.
        tokens: at most T.
        scale, window, distance_bias_HS: as given to `attention`.

    Returns:
        [B, H] in [0, 1], in the LSE's dtype.
    """
    query_BHTD, lse_BHT = query_BHTD[:, :, :tokens], lse_BHT[..., :tokens]
    logit_BHT = row_dot(query_BHTD, repeat_groups(key_BGSD[:, :, :1], query_BHTD.shape[1]))
    logit_BHT *= query_BHTD.shape[-1] ** -0.5 if scale is None else scale
    if distance_bias_HS is not None:
        logit_BHT += distance_bias_HS[:, :tokens]
    # Rounding may lift a weight of 1 above it.
    weight_BHT = (logit_BHT - lse_BHT).exp_().clamp_(max=1.0)
    if window is not None:
        weight_BHT[..., window:] = 0.0
    return weight_BHT.mean(-1)
