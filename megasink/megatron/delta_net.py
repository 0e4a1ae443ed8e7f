"""Gated delta-net layers of hybrid models, as Megatron builds them, under any layout."""

from functools import partial

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import Tensor
from torch.distributed import ProcessGroup


def prepare_delta_net(model: HybridModel) -> None:
    """Make weights and gradients of gated delta-net independent of the tensor-parallel layout.

    The separately sharded parts of a weight get names, which `named_parts` yields.

    The norm of the heads' outputs is on every rank, and sees that rank's heads. Without sequence
    parallelism Megatron does not sum its gradients over the ranks
    (megatron/core/distributed/finalize_model_grads.py:452), and the copies would drift apart.
    """
    for layer in (m for m in model.modules() if isinstance(m, GatedDeltaNet)):
        names, sizes = layer.in_proj_split_names, layer.in_proj_split_sections
        layer.in_proj.weight.sections = dict(zip(names, sizes, strict=True))
        layer.conv1d.weight.sections = dict(zip(names[:3], sizes[:3], strict=True))
        if layer.tp_size > 1 and not model.config.sequence_parallel:
            for parameter in layer.out_norm.parameters():
                parameter.register_hook(partial(_summed, layer.tp_group))


def _summed(group: ProcessGroup, gradient: Tensor) -> Tensor:
    total = gradient.clone()
    torch.distributed.all_reduce(total, group=group)
    return total
