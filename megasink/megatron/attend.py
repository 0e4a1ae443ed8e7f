"""Attention on a rank that has the whole sequence, in Megatron's layout.

Shapes: S sequence, B batch, H query heads, G key/value groups, T queries, D head dim.
"""

from collections.abc import Callable

from torch import Tensor

# (query_BHTD, key_BGSD, value_BGSD) -> output_BHTD and gate_BHT or None; the last query is aligned
# with the last key.
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def attend_alone(
    attend: Attend, query_SBHD: Tensor, key_SBGD: Tensor, value_SBGD: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Call `attend` on tensors in Megatron's layout, for a rank that has the whole sequence.

    Returns:
        Output [S, B, H, D] and the gate [B, H, S] or None.
    """
    out_BHTD, gate_BHT = attend(
        *(x.permute(1, 2, 0, 3) for x in (query_SBHD, key_SBGD, value_SBGD))
    )
    return out_BHTD.permute(2, 0, 1, 3), gate_BHT
