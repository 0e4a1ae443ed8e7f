"""Megatron's specs with megasink's modules, for hybrid stacks and the blocks of GPT models.

Rarely used parts are imported when a config asks for them.
"""

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import LayerNormBuilder, WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megasink.attention.variants.gate_options import changes_self_attention, trailing_rows
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.head_balance import HeadBalance
from megasink.megatron.torch_norm import TorchNorm

# Options of the block around attention, which other modules carry out.
_OPTIONS = ("norm_without_gain", "qk_l2_norm", "multi_head_addition", "sandwich_norm", "post_norm")


def with_options(config: Any, spec: str, arguments: Any = None) -> Any:
    """Return the TransformerConfig of a config that a stack hands to a spec, with its options."""
    is_bare = isinstance(config, TransformerConfig) and not hasattr(config, "hybrid_stack_spec")
    attached = is_bare and isinstance(vars(config).get("statistics"), HeadBalance)
    if not attached or arguments is not None or "MEGASINK_OPTIONS" in os.environ:
        from megasink.megatron import stack_options

        config = stack_options.with_options(config, spec, arguments)
    config.statistics.follow(config)
    return config


def our_block(
    layers: Iterable[Any], norm: LayerNormBuilder, config: Any
) -> TransformerBlockSubmodules:
    """Return the block spec of these layers and a final norm, with the options of the block."""
    block = TransformerBlockSubmodules([*layers], with_our_modules(norm, config))
    has_options = any(getattr(config, name) for name in _OPTIONS)
    expert_biases = config.add_bias_linear and config.num_moe_experts
    if has_options or expert_biases or config.residual_clip is not None:
        from megasink.megatron.block_options import with_block_options

        block = with_block_options(block, config)
    return block


def with_our_modules(node: Any, config: Any) -> Any:
    """Return a copy of a spec tree with megasink's modules substituted."""
    if node is WrappedTorchNorm:
        return TorchNorm
    if isinstance(node, list):
        return [with_our_modules(entry, config) for entry in node]
    if isinstance(node, ModuleSpec):
        module = node.module
        if module is SelfAttention and changes_self_attention(config):
            if (config.gate_position, config.sdpa_output_norm) == ("sdpa", "none"):
                from megasink.megatron.gated_attention import GatedSelfAttention as module
            else:
                from megasink.megatron.gate_positions import PositionedGateSelfAttention as module
        elif module is MLASelfAttention:
            from megasink.megatron.latent_attention import LatentSelfAttention

            module = LatentSelfAttention
        submodules = with_our_modules(node.submodules, config)
        return dataclasses.replace(node, module=module, submodules=submodules)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        changes = {
            f.name: with_our_modules(getattr(node, f.name), config)
            for f in dataclasses.fields(node)
            if f.init
        }
        if isinstance(node, SelfAttentionSubmodules | MLASelfAttentionSubmodules):
            changes["core_attention"] = CoreAttention
            plain = isinstance(node, SelfAttentionSubmodules)  # others project gates apart
            if plain and config.switch_heads != "none":
                from megasink.megatron.switch_heads import with_switch_rows

                changes["linear_qkv"] = with_switch_rows(node.linear_qkv)
            elif plain and trailing_rows(config):
                from megasink.megatron.gate_projection import with_gate_rows

                changes["linear_qkv"] = with_gate_rows(node.linear_qkv)
        return dataclasses.replace(node, **changes)
    return node
