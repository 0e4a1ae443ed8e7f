"""Head importance across process groups.

Shapes: H query heads of the layer, h those of this tensor-parallel rank, L layers of the model.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def gather_heads(importance_h: Tensor, tp_group: ProcessGroup) -> Tensor:
    """The importance of all heads of a layer from the shards of the tensor-parallel ranks.

    Args:
        importance_h: [h] of this rank; ranks hold consecutive heads.
        tp_group: the tensor-parallel group.

    Returns:
        [H], the same on every rank; not differentiable.
    """
    importance_h = importance_h.detach()
    world = tp_group.size()
    if world == 1:
        return importance_h
    gathered = importance_h.new_empty(world * importance_h.shape[0])
    torch.distributed.all_gather_into_tensor(gathered, importance_h.contiguous(), group=tp_group)
    return gathered


def own_heads(importance_H: Tensor, tp_group: ProcessGroup) -> Tensor:
    """This rank's [h] of a tensor over all [H] heads."""
    count = importance_H.shape[0] // tp_group.size()
    return importance_H.narrow(0, tp_group.rank() * count, count)


def sum_over_ranks(statistics: Tensor, dp_cp_group: ProcessGroup, pp_group: ProcessGroup) -> Tensor:
    """Sum of a statistic over data- and context-parallel ranks and pipeline stages, in place.

    A stage holds zeros for the layers of the others, so after the sum every rank knows all layers.
    """
    for group in (dp_cp_group, pp_group):
        if group.size() > 1:
            torch.distributed.all_reduce(statistics, group=group)
    return statistics
