"""Hybrid models: a stack in which every layer is one of attention, FFN, experts, Mamba, delta net.

Megatron builds all of it; megasink's attention comes through the spec (``megatron.hybrid_specs``).
Layers are numbered as in Megatron: an FFN is a layer of its own, and statistics of heads have a row
for every layer, empty for those without attention.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.torch_norm import LayerNormBuilder
from torch import Tensor
from torch.distributed import ProcessGroup


class MegasinkHybridStack(HybridStack):
    """HybridStack whose final norm comes from the spec.

    Upstream's is TransformerEngine's, whatever the spec says
    (megatron/core/models/hybrid/hybrid_block.py:225).

    Args:
        norm: Builder of the final norm; None for no norm.
        args, kwargs: Of HybridStack.
    """

    def __init__(self, *args: Any, norm: LayerNormBuilder | None, **kwargs: Any):
        super().__init__(*args, **kwargs | {"post_layer_norm": False})
        self.post_layer_norm = norm is not None
        if self.post_process and norm is not None:
            self.final_norm = norm(
                config=self.config,
                hidden_size=self.config.hidden_size,
                eps=self.config.layernorm_epsilon,
            )


def prepare_delta_net(model: HybridModel) -> None:
    """Make weights and gradients of gated delta-net independent of the tensor-parallel layout.

    The parts of a weight that are sharded by themselves get names, which `named_parts` yields.

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
