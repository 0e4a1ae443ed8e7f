"""Reorder the tokens of each row so that padding comes last, where causal attention ignores it.

A row padded on the left is rotated, so that its tokens come first. The positions that RoPE gave
them and the distances between them stay, and causal attention over the rotated row needs no mask.

Shapes: B rows, T tokens, N heads, D head dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowOrder:
    """A permutation of each row's tokens, [B * T] old places in the concatenated rows, and back."""

    forth: Tensor
    back: Tensor

    def apply(self, tensor_BNTD: Tensor) -> Tensor:
        """Return the tensor with its tokens in the new order, as a view of [B, T, N, D]."""
        return _in_order(tensor_BNTD, self.forth, self.back)

    def undo(self, tensor_BNTD: Tensor) -> Tensor:
        """Return the tensor with its tokens in the old order."""
        return _in_order(tensor_BNTD, self.back, self.forth)


def row_order(real_BT: Tensor) -> RowOrder:
    """Return the order that moves each row's leading padding to its end, without a sync."""
    rows, tokens = real_BT.shape
    before_B1 = (real_BT.cumsum(-1) == 0).sum(-1, keepdim=True)
    token_T = torch.arange(tokens, device=real_BT.device)
    row_B1 = tokens * torch.arange(rows, device=real_BT.device)[:, None]
    forth_BT = (token_T + before_B1) % tokens + row_B1
    back_BT = (token_T - before_B1) % tokens + row_B1
    return RowOrder(forth_BT.flatten(), back_BT.flatten())


class _Permute(torch.autograd.Function):
    """x[forth]; its backward is x[back], whereas indexing's would add rows one by one."""

    @staticmethod
    def forward(ctx: Any, rows_NX: Tensor, forth: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows_NX.index_select(0, forth)

    @staticmethod
    def backward(ctx: Any, *grads_NX: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads_NX[0].index_select(0, back), None, None


def _in_order(tensor_BNTD: Tensor, forth: Tensor, back: Tensor) -> Tensor:
    tensor_BTND = tensor_BNTD.transpose(1, 2)
    device = tensor_BNTD.device
    rows_NX = tensor_BTND.flatten(0, 1).flatten(1)
    moved_NX: Tensor = _Permute.apply(rows_NX, forth.to(device), back.to(device))
    return moved_NX.view(tensor_BTND.shape).transpose(1, 2)


def one_row(tensor_BNTD: Tensor) -> Tensor:
    """Return the concatenated rows, [1, N, B * T, D]: a view of [B, T, N, D]."""
    if tensor_BNTD.shape[0] == 1:
        return tensor_BNTD
    return tensor_BNTD.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)


def as_rows(tensor_1NTD: Tensor, rows: int) -> Tensor:
    """Undo `one_row`."""
    if rows == 1:
        return tensor_1NTD
    return tensor_1NTD.transpose(1, 2)[0].unflatten(0, (rows, -1)).transpose(1, 2)
