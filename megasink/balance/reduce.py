"""Head importance across process groups.

Shapes: H query heads of the layer, h those of this tensor-parallel rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class ImportanceSum:
    """The importance of all heads of a layer over the tokens of a group of ranks.

    The constructor starts the all-reduce in the forward pass; reading the result in the backward
    pass waits for it.

    Args:
        gate_sum_h: Gates of this rank's heads, summed over its tokens; ranks of `tp_group` hold
            consecutive heads.
        tokens: Number of tokens in the sum.
        tp_group: Tensor-parallel group, a subset of `group`.
        group: Ranks whose tokens count.
        targets: Number of targets of this rank's microbatch, a scalar; None if not needed.
    """

    def __init__(
        self,
        gate_sum_h: Tensor,
        tokens: int,
        tp_group: ProcessGroup,
        group: ProcessGroup,
        targets: Tensor | None = None,
    ):
        own, tp_rank = len(gate_sum_h), tp_group.rank()
        self._replicas = group.size() // tp_group.size()
        # A sum per head, then tokens and targets.
        self._sums = gate_sum_h.new_zeros(own * tp_group.size() + 2)
        self._sums.narrow(0, tp_rank * own, own).copy_(gate_sum_h.detach())
        if tp_rank == 0:  # the other ranks of its group have the same tokens
            self._sums[-2] = tokens
            if targets is not None:
                self._sums[-1] = targets
        self._work: Any = None
        if group.size() > 1:
            self._work = torch.distributed.all_reduce(self._sums, group=group, async_op=True)

    def importance(self) -> Tensor:
        """Return the importance [H], the same on every rank of the group; not differentiable."""
        self._wait()
        return self._sums[:-2] / self._sums[-2]

    def mean_tokens(self) -> Tensor:
        """Return the mean of `tokens` over the group's ranks with tokens of their own, a scalar."""
        self._wait()
        return self._sums[-2] / self._replicas

    def mean_targets(self) -> Tensor:
        """Return the mean of `targets` over the group's microbatches, a scalar."""
        self._wait()
        return self._sums[-1] / self._replicas

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def own_heads(importance_H: Tensor, tp_group: ProcessGroup) -> Tensor:
    """Return this rank's slice [h] of a tensor [H] over all heads."""
    count = importance_H.shape[-1] // tp_group.size()
    return importance_H.narrow(-1, tp_group.rank() * count, count)
