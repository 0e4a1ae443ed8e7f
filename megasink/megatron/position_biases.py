"""Score biases that depend only on head and distance: ALiBi, T5's, and P2's "relative".

Each module returns one row of biases per head of this tensor-parallel rank, by distance i - j;
attention adds them to the scores (``distance_bias_HS``).

Shapes: H query heads of this tensor-parallel rank, S distances 0, .., S - 1, N buckets.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.megatron.config import MegasinkTransformerConfig
from megasink.megatron.parameters import new_parameter, widened


def build_position_bias(
    config: MegasinkTransformerConfig, tp_group: ProcessGroup
) -> "DistanceBias":
    """Build the bias of ``config.attention_bias_type`` for the heads of this rank."""
    kinds: dict[str, Callable[..., DistanceBias]] = {
        "alibi": AlibiBias,
        "t5": RelativeBias,
        "bucket": BucketBias,
    }
    return kinds[config.attention_bias_type](config, tp_group)


class DistanceBias(torch.nn.Module):
    """Base class of modules that return biases [H, S] in float32."""

    def forward(self, distances: int, device: torch.device) -> Tensor:
        """Return the biases of the distances 0, .., distances - 1, on the device."""
        raise NotImplementedError


class AlibiBias(DistanceBias):
    """ALiBi: -m_h (i - j), with a fixed slope m_h for each head of the whole model (P2.22).

    In float32, which is exact for integers up to 2**24; bf16 cannot tell distances above 256 apart.
    """

    def __init__(self, config: MegasinkTransformerConfig, tp_group: ProcessGroup):
        super().__init__()
        slopes = torch.tensor(alibi_slopes(config.num_attention_heads), dtype=torch.float32)
        self.slope_H = slopes.chunk(tp_group.size())[tp_group.rank()]  # not a buffer: never bf16

    def forward(self, distances: int, device: torch.device) -> Tensor:
        self.slope_H = self.slope_H.to(device)
        distance_S = torch.arange(distances, dtype=torch.float32, device=device)
        return -self.slope_H[:, None] * distance_S


class BucketBias(DistanceBias):
    """P2's "relative" embedding: the index of T5's bucket itself, nothing learned (P2.21).

    Its positive sign favors distant keys, by up to N - 1: a loss of 5.45 in the paper's Table 2,
    where every other scheme has 3.7 to 3.8.
    """

    def __init__(self, config: MegasinkTransformerConfig, tp_group: ProcessGroup):
        super().__init__()
        self.heads = config.num_attention_heads // tp_group.size()
        self.buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.bucket_S = torch.empty(0, dtype=torch.long)

    def buckets_of(self, distances: int, device: torch.device) -> Tensor:
        """Return the bucket indices [S], int64, cached for the longest sequence seen."""
        if len(self.bucket_S) < distances or self.bucket_S.device != device:
            self.bucket_S = bucket_of_distance(distances, self.buckets, self.max_distance)
            self.bucket_S = self.bucket_S.to(device)
        return self.bucket_S[:distances]

    def forward(self, distances: int, device: torch.device) -> Tensor:
        return self.buckets_of(distances, device).float().expand(self.heads, -1)


class RelativeBias(BucketBias):
    """T5's relative embedding: one learned scalar for each head and bucket of distances (P2.20).

    `weight` is [N, H], sharded by heads. One table per layer; T5 shares the first layer's.
    """

    def __init__(self, config: MegasinkTransformerConfig, tp_group: ProcessGroup):
        super().__init__(config, tp_group)
        # Drawn by megasink.megatron.initial_weights.
        self.weight = new_parameter((self.buckets, self.heads), 0.0, config, axis=1)

    def forward(self, distances: int, device: torch.device) -> Tensor:
        bucket_S = self.buckets_of(distances, device)
        # Not indexing, whose backward is nondeterministic on a GPU.
        return torch.nn.functional.embedding(bucket_S, widened(self.weight)).T


def alibi_slopes(heads: int) -> list[float]:
    """Return m_h for the heads of a layer (P2.22, Eq. 8; ALiBi's rule for other head counts).

    For a power of two: the geometric sequence 2 ** (-8 h / heads), h = 1, .., heads. Otherwise: the
    sequence of the next smaller power of two, then every second slope of the next larger. (Eq. 8 of
    P2 has only the first rule, its code has both.)
    """

    def geometric(count: int) -> list[float]:
        return [2.0 ** (-8.0 * h / count) for h in range(1, count + 1)]

    power = 2 ** int(math.log2(heads))
    return geometric(power) + geometric(2 * power)[::2][: heads - power]


def bucket_of_distance(distances: int, buckets: int, max_distance: int) -> Tensor:
    """Return T5's causal buckets of the distances 0, .., distances - 1: [S] int64 (P2.21, Eq. 7).

    d for d < N/2; N/2 + floor(N/2 * log(d / (N/2)) / log(max_distance / (N/2))) below
    max_distance, as in T5 and P2's code; N - 1 from there on. (Eq. 7 as printed takes the floor
    before multiplying by N/2, which puts all these distances into bucket N/2.)
    """
    half = buckets // 2
    distance_S = torch.arange(distances, dtype=torch.float64)
    ratio_S = torch.log(distance_S.clamp(min=half) / half) / math.log(max_distance / half)
    # Rounding of log must not move a distance exactly at a boundary into the lower bucket.
    far_S = half + (ratio_S * (buckets - half) + 1e-9).floor()
    return torch.where(distance_S < half, distance_S, far_S.clamp(max=buckets - 1)).long()
