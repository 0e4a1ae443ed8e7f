"""From the gates of one layer to its head importance, its statistics and its balance gradient.

Shapes: S sequence, B batch, H query heads of this tensor-parallel rank, T = S tokens.
"""

from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.attention import gate_sum
from megasink.balance.attach import attach_gradient
from megasink.balance.loss import head_balance_gradient, head_balance_loss
from megasink.balance.reduce import gather_heads, own_heads
from megasink.balance.tracker import HeadTracker
from megasink.layers.transformer_config import MegasinkTransformerConfig


def count_heads(
    out_SBX: Tensor,
    gate_BHT: Tensor,
    config: MegasinkTransformerConfig,
    layer_number: int,
    tp_group: ProcessGroup,
) -> Tensor:
    """Record the importance of all heads of a layer; attach the gradient of the balance loss.

    To be called where ``self.training and torch.is_grad_enabled()`` only: recompute runs forward a
    first time without gradients, and that run counts nothing.

    Args:
        out_SBX: the output that the gate belongs to; its backward runs that of the balance loss.
        gate_BHT: one gate per head and token, in [0, 1]; differentiable where the loss is on.
        layer_number: 1-based index in the whole model.

    Returns:
        a tensor equal to `out_SBX`.
    """
    batch, _, tokens = gate_BHT.shape
    importance = gate_sum(gate_BHT) / (batch * tokens)
    importance_all = gather_heads(importance, tp_group)
    loss, coeff = None, config.head_balance_coeff
    if coeff > 0:
        loss = head_balance_loss(importance_all, coeff)
        coefficients = own_heads(head_balance_gradient(importance_all, coeff), tp_group)
        weight = float(batch * tokens) if config.calculate_per_token_loss else 1.0
        out_SBX = attach_gradient(out_SBX, importance, coefficients, weight)
    HeadTracker.record(layer_number - 1, importance_all, batch * tokens, loss)
    return out_SBX
