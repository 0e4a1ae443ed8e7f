"""Applies the options of the block around attention to Megatron's layer specs."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm, LayerNormBuilder
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

if TYPE_CHECKING:
    from megasink.megatron.config import MegasinkTransformerConfig

# Checkpoint names of the norms of ResidualAdd: {module of the layer: name in the checkpoint}.
_NORMS = {
    "self_attn_bda.layernorm.": "post_self_attn_layernorm.",
    "mlp_bda.layernorm.": "post_mlp_layernorm.",
}


class GainlessRMSNorm(torch.nn.Module):
    """RMSNorm without a weight, x / sqrt(mean(x^2) + eps), as in nanochat; for any layout.

    It has no parameter, so nothing needs a sum over sequence-parallel ranks or a place in a
    checkpoint. Built from the transformer config, like Megatron's norms.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ):
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis of x [..., hidden_size]; same dtype."""
        return F.rms_norm(x, (self.hidden_size,), eps=self.eps)


def with_block_options(
    block: TransformerBlockSubmodules, config: "MegasinkTransformerConfig"
) -> TransformerBlockSubmodules:
    """Return the block spec with the modules required by :class:`BlockOptions`.

    Added norms use the builder of Megatron's final norm.
    """
    layers, norm = list(block.layer_specs), block.layer_norm
    if config.norm_without_gain:
        layers, norm = [_with_norms(layer, GainlessRMSNorm) for layer in layers], GainlessRMSNorm
    if config.qk_l2_norm:  # upstream's local spec forgets it (training/models/gpt.py:120)
        layers = [
            _with_attention(layer, q_layernorm=L2Norm, k_layernorm=L2Norm) for layer in layers
        ]
    if config.add_bias_linear and config.num_moe_experts:
        from megasink.megatron.expert_biases import with_expert_biases

        layers = [with_expert_biases(layer) for layer in layers]
    if config.multi_head_addition:
        from megasink.megatron.multi_head_addition import HeadSumProjection

        layers = [_with_attention(layer, linear_proj=HeadSumProjection) for layer in layers]
    if config.sandwich_norm or config.post_norm or config.residual_clip is not None:
        layers = [_with_residual_add(layer, norm, config) for layer in layers]
    if config.post_norm:
        layers = [_with_norms(layer, IdentityOp) for layer in layers]
        norm = None
    return dataclasses.replace(block, layer_specs=layers, layer_norm=norm)


def changed(layer: ModuleSpec, **submodules: Any) -> ModuleSpec:
    """Return a spec with other submodules."""
    return dataclasses.replace(
        layer, submodules=dataclasses.replace(layer.submodules, **submodules)
    )


def _with_attention(layer: ModuleSpec, **submodules: Any) -> ModuleSpec:
    return changed(layer, self_attention=changed(layer.submodules.self_attention, **submodules))


def _with_residual_add(
    layer: ModuleSpec, norm: LayerNormBuilder, config: "MegasinkTransformerConfig"
) -> ModuleSpec:
    from megasink.megatron.residual import ResidualAdd

    add = ModuleSpec(module=ResidualAdd, params={"config": config, "norm": norm})
    names = layer.submodules.sharded_state_dict_keys_map | _NORMS
    return changed(layer, self_attn_bda=add, mlp_bda=add, sharded_state_dict_keys_map=names)


def _with_norms(layer: ModuleSpec, norm: Any) -> ModuleSpec:
    """Replace the norms before attention and FFN, also those fused into the linear layer."""
    linear_qkv = layer.submodules.self_attention.submodules.linear_qkv
    layer = _with_attention(layer, linear_qkv=_unfused(linear_qkv))
    mlp = layer.submodules.mlp
    if isinstance(mlp, functools.partial) and "linear_fc1" in vars(mlp.keywords["submodules"]):
        dense = mlp.keywords["submodules"]
        dense = dataclasses.replace(dense, linear_fc1=_unfused(dense.linear_fc1))
        mlp = functools.partial(mlp.func, **mlp.keywords | {"submodules": dense})
    return changed(layer, input_layernorm=norm, pre_mlp_layernorm=norm, mlp=mlp)


def _unfused(linear: Any) -> Any:
    """Replace TransformerEngine's fused norm and linear layer by the linear layer alone."""
    from megatron.core.extensions import transformer_engine

    if linear is getattr(transformer_engine, "TELayerNormColumnParallelLinear", None):
        return transformer_engine.TEColumnParallelLinear
    return linear
