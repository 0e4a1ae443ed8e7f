"""Weights under which a mistake in a sink or gate shows, the same in every layout.

Shapes: H query heads of the layer, G key/value groups, X rows of a group.
"""

from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from megasink.attention.variants.gate_options import gate_shape
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.gate_modules import ExplicitGate
from megasink.megatron.gate_positions import HeadNorm
from megasink.megatron.gated_attention import GatedSelfAttention
from megasink.megatron.latent_attention import LatentSelfAttention


def skew_gates(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Gates far from 1/2 that differ by head: with random weights all heads are alike.

    Every embedding gets a component that the rows of the gates read with weights that differ.
    """
    for module in (m for model in models for m in model.modules()):
        if isinstance(module, LanguageModule):
            if module.config.attention_variant != "gated":
                continue
            if hasattr(module, "embedding"):
                module.embedding.word_embeddings.weight.data += 0.4
            elif module.post_process and module.share_embeddings_and_output_weights:
                module.output_layer.weight.data += 0.4  # the copy of another stage
        elif isinstance(module, GatedSelfAttention):
            _skew_biases(module)
            if module.has_rows or module.megatrons_layout:
                _skew_rows(module)
        elif isinstance(module, LatentSelfAttention):
            if module.linear_gate is not None:
                skew = _skew(module.config).chunk(module.tp_group.size())[module.tp_group.rank()]
                module.linear_gate.weight.data += skew[:, None] / 20.0
        elif isinstance(module, ExplicitGate) and module.logit is not None:
            count = module.logit.numel()
            rank = module.tp_group.rank() if module.sharded else 0
            module.logit.data.copy_(2.0 * _zigzag(count, rank))
        elif isinstance(module, HeadNorm) and module.weight is not None:
            count = module.weight.numel()
            module.weight.data.copy_(1.0 + 0.2 * _zigzag(count, module.tp_group.rank()))
    return models


def _skew_biases(attention: GatedSelfAttention) -> None:
    """Adam moves a bias that starts at 0 by a step of any size, rounding included."""
    gates = sum(getattr(attention.linear_qkv, "row_split", (0, 0, 0))[1:])
    for name in ("linear_qkv", "linear_gate"):
        bias = getattr(getattr(attention, name), "bias", None)
        if bias is not None:
            sharded = name == "linear_qkv"
            count = len(bias) - (gates if sharded else 0)
            bias.data[:count] += 0.1 * _zigzag(count, attention.tp_group.rank() if sharded else 0)


def _skew(config: Any) -> Tensor:
    """Weights of the rows of the gates, by head."""
    heads, width = gate_shape(config)
    skew_H = torch.tensor([1.5, -2.0, 0.5, -1.0]).repeat(heads)[:heads]
    return skew_H.repeat_interleave(width)


def _skew_rows(attention: GatedSelfAttention) -> None:
    config, skew = attention.config, _skew(attention.config)
    if attention.megatrons_layout:  # [q | gate | k | v] of each group
        gate_GX = skew.view(config.num_query_groups, -1)
        key_value_GX = gate_GX.new_zeros(config.num_query_groups, 2 * config.kv_channels)
        skew = torch.cat([torch.zeros_like(gate_GX), gate_GX, key_value_GX], dim=1).flatten()
    mine = skew.chunk(attention.world_size)[attention.tp_group.rank()]
    linear = attention.linear_qkv
    padding = getattr(linear, "row_split", (0, 0, 0))[2]
    rows = slice(len(linear.weight) - padding - len(mine), len(linear.weight) - padding)
    linear.weight.data[rows] += mine[:, None] / 20.0
    if linear.bias is not None:
        linear.bias.data[rows] += mine


def _zigzag(count: int, rank: int) -> Tensor:
    """The rank's part of a vector with values between -2.5 and 2.5, of another mean every 16."""
    position = count * rank + torch.arange(count)
    return (1.0 - 2.0 * (position % 2)) + 1.5 * torch.sin(position / 8.0)


def skew_sinks(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Sinks of magnitude 5 that differ by layer and head: a zero sink would hide mistakes.

    And biases of standard deviation 2, where they start with 0.02.
    """
    for module in (m for model in models for m in model.modules()):
        if not isinstance(module, CoreAttention):
            continue
        for bias in (module.key_bias, module.value_bias):
            if bias is not None:
                bias.data.mul_(100.0)
        if module.softmax_offset is not None:
            count = module.softmax_offset.numel()
            head_H = count * module.tp_group.rank() + torch.arange(count)
            sign_H = 1.0 - 2.0 * ((head_H + module.layer_number) % 2)
            module.softmax_offset.data.copy_(sign_H * (4.0 + 0.5 * head_H))
    return models
