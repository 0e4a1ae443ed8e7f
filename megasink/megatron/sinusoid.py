"""The fixed sinusoidal position embedding, added to the token embedding (P2.20, Eq. 6)."""

import torch
from torch import Tensor


class SinusoidalPositions(torch.nn.Module):
    """Replaces the learned position table in Megatron's LanguageModelEmbedding.

    The table is a non-persistent buffer, so it is not trained, decayed, counted in norms or saved
    in checkpoints.
    """

    table: Tensor

    def __init__(self, positions: int, hidden_size: int, device: torch.device):
        super().__init__()
        table = sinusoidal_table(positions, hidden_size).to(device)
        self.register_buffer("table", table, persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Map positions [B, S] to [B, S, hidden_size]."""
        return torch.nn.functional.embedding(position_ids, self.table)


def sinusoidal_table(positions: int, hidden_size: int) -> Tensor:
    """Return the table [positions, hidden_size], float32, with interleaved sines and cosines.

    Channel 2k is sin(t / 10000 ** (2k / d)) and channel 2k + 1 its cosine, from position t = 0 on:
    Eq. 6 of P2. (P2's code puts all sines before all cosines, a channel order that makes no
    difference to a new model.) Computed in float64, because bf16 cannot tell positions above 256
    apart.
    """
    position_T1 = torch.arange(positions, dtype=torch.float64)[:, None]
    exponent_K = torch.arange(0, hidden_size, 2, dtype=torch.float64) / hidden_size
    angle_TK = position_T1 * 10000.0**-exponent_K
    return torch.stack((angle_TK.sin(), angle_TK.cos()), -1).flatten(1).float()
