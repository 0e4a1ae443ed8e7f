"""Layer specs: Megatron's own specs with megasink's core attention."""

import dataclasses
from typing import Any

from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megasink.gate_options import changes_self_attention, trailing_rows
from megasink.layers.block_options import with_block_options
from megasink.layers.core_attention import CoreAttention
from megasink.layers.gate_projection import with_gate_rows
from megasink.layers.gated_self_attention import GatedSelfAttention
from megasink.layers.norm import TorchNorm
from megasink.lora.spec import with_adapters


def block_spec(config: GPTModelConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the block spec of this pipeline stage, for ``GPTModelConfig.transformer_layer_spec``.

    Megatron chooses the modules (TransformerEngine or local, by ``--transformer-impl``). Every
    self-attention then uses :class:`CoreAttention` (with an explicit gate also
    :class:`GatedSelfAttention` and a linear_qkv with gate rows), and every WrappedTorchNorm becomes
    a norm that supports sequence parallelism. This returns a block, not a layer, because the
    builder overwrites the core attention of a layer under ``--attention-backend local``
    (megatron/training/models/gpt.py:249).
    """
    spec = default_layer_spec(config, vp_stage)
    if isinstance(spec, TransformerBlockSubmodules):
        layers, norm = spec.layer_specs, spec.layer_norm
    else:
        count = get_num_layers_to_build(config.transformer, vp_stage=vp_stage)
        layers, norm = [spec] * count, LayerNormImpl
    ours = TransformerBlockSubmodules(
        layer_specs=[_with_our_modules(layer, config.transformer) for layer in layers],
        layer_norm=_with_our_modules(norm, config.transformer),
    )
    return with_adapters(with_block_options(ours, config.transformer), config.transformer)


def _with_our_modules(node: Any, config: Any) -> Any:
    """Return a copy of a spec tree with megasink's modules substituted."""
    if node is WrappedTorchNorm:
        return TorchNorm
    if isinstance(node, ModuleSpec):
        gates = node.module is SelfAttention and changes_self_attention(config)
        return dataclasses.replace(
            node,
            module=GatedSelfAttention if gates else node.module,
            submodules=_with_our_modules(node.submodules, config),
        )
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        changes = {
            f.name: _with_our_modules(getattr(node, f.name), config)
            for f in dataclasses.fields(node)
            if f.init
        }
        if isinstance(node, SelfAttentionSubmodules):
            changes["core_attention"] = CoreAttention
            if trailing_rows(config):
                changes["linear_qkv"] = with_gate_rows(node.linear_qkv)
        return dataclasses.replace(node, **changes)
    return node
