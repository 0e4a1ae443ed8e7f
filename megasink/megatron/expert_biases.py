"""Biases of experts that can be trained, as GPT-OSS has them (--add-bias-linear with experts)."""

import dataclasses
import functools
from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


class ExpertOutput(RowParallelLinear):
    """The second linear layer of an expert with a bias.

    Megatron multiplies the bias by the probability of the expert and adds it in place
    (megatron/core/transformer/mlp.py:354), which autograd may forbid: the output can be the input
    of a reduction that had nothing to do. This returns a new tensor.

    Megatron also marks the bias as one of a layer with sequence parallelism, and would add up the
    gradients of different experts over the tensor-parallel ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.bias is not None:
            self.bias.sequence_parallel = False

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the layer; return its output and its bias, which is not added yet."""
        output, bias = super().forward(input_)
        return output if bias is None else output.clone(), bias


def with_expert_biases(layer: ModuleSpec) -> ModuleSpec:
    """Return a spec whose experts' biases can be trained.

    TransformerEngine's grouped experts add theirs out of place, and dense layers have none.
    """
    mlp = layer.submodules.mlp
    if not (isinstance(mlp, functools.partial) and mlp.func is MoELayer):
        return layer
    experts = mlp.keywords["submodules"].experts
    linears = experts.keywords.get("submodules") if isinstance(experts, functools.partial) else None
    if linears is None or linears.linear_fc2 is not RowParallelLinear:
        return layer
    linears = dataclasses.replace(linears, linear_fc2=ExpertOutput)
    experts = functools.partial(experts, submodules=linears)
    moe = dataclasses.replace(mlp.keywords["submodules"], experts=experts)
    changed = dataclasses.replace(layer.submodules, mlp=functools.partial(mlp, submodules=moe))
    return dataclasses.replace(layer, submodules=changed)
