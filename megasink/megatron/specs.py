"""Layer specs: Megatron's own specs with megasink's attention.

Rarely used parts are imported when a config asks for them: explicit gates, options of the
block around attention, a model configuration of ``megatron.training``.
"""

import dataclasses
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megasink.attention.variants.gate_options import changes_self_attention, trailing_rows
from megasink.megatron.block_options import with_block_options
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.head_balance import with_options
from megasink.megatron.torch_norm import TorchNorm


def layer_spec(config: Any, *more: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the block spec of this pipeline stage, with megasink's attention in every layer.

    Give the result to ``GPTModel(config, layer_spec(config), ...)``, or the function itself to a
    stack that calls one (docs/integrations.md): ``--spec megasink.megatron layer_spec`` of
    Megatron-LM's pretrain_gpt.py and of slime, ``transformer_layer_spec`` of Megatron's
    GPTModelConfig and of Megatron-Bridge's providers. It is called as ``(config)``,
    ``(config, vp_stage)`` or ``(args, config, vp_stage)``.

    The options are those of the :class:`HeadBalance` that is attached to the config. If there is
    none, they are taken from ``args.megasink_options`` or from the environment variable
    MEGASINK_OPTIONS, and a HeadBalance is attached here.

    Megatron chooses the modules (TransformerEngine or local, by ``config.transformer_impl``). Every
    self-attention then uses :class:`CoreAttention` (with an explicit gate also GatedSelfAttention
    and a linear_qkv with gate rows), and every WrappedTorchNorm becomes a norm that supports
    sequence parallelism. This returns a block, not a layer, because a builder may overwrite the
    core attention of a layer (megatron/training/models/gpt.py:249).

    Args:
        config: TransformerConfig, or a model configuration that has one as ``transformer``.
        more: The virtual pipeline stage, or the config and the stage of a stack that hands over its
            arguments first, as slime does.
        vp_stage: Virtual pipeline stage.

    Raises:
        UserError: There is no TransformerConfig, or no place has options for it.
        ConfigError: Options are impossible, or two places have different ones.
    """
    arguments = None
    if len(more) == 1:
        (vp_stage,) = more
    elif more:
        arguments, (config, vp_stage) = config, more
    transformer = with_options(config, "layer_spec", arguments)
    if transformer is config:
        spec = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=config.transformer_impl == "transformer_engine",
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
            vp_stage=vp_stage,
        )
    else:
        from megatron.training.models.gpt import default_layer_spec

        spec = default_layer_spec(config, vp_stage)
    if isinstance(spec, TransformerBlockSubmodules):
        layers, norm = spec.layer_specs, spec.layer_norm
    else:
        count = get_num_layers_to_build(transformer, vp_stage=vp_stage)
        layers, norm = [spec] * count, LayerNormImpl
    first = get_transformer_layer_offset(transformer, vp_stage) + 1
    transformer.statistics.expected[first] = len(layers)
    layer_config = getattr(transformer, "get_config_for_layer", lambda _: transformer)
    ours = TransformerBlockSubmodules(
        layer_specs=[
            with_our_modules(layer, layer_config(number))
            for number, layer in enumerate(layers, first)
        ],
        layer_norm=with_our_modules(norm, transformer),
    )
    ours = with_block_options(ours, transformer)
    if transformer.mtp_num_layers and ours.layer_specs:
        from megasink.megatron.multi_token_prediction import counted_once

        *others, last = ours.layer_specs
        ours = dataclasses.replace(ours, layer_specs=[*others, counted_once(last)])
    return ours


def with_our_modules(node: Any, config: Any) -> Any:
    """Return a copy of a spec tree with megasink's modules substituted."""
    if node is WrappedTorchNorm:
        return TorchNorm
    if isinstance(node, list):
        return [with_our_modules(entry, config) for entry in node]
    if isinstance(node, ModuleSpec):
        module = node.module
        if module is SelfAttention and changes_self_attention(config):
            from megasink.megatron.gated_attention import GatedSelfAttention

            module = GatedSelfAttention
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
            if isinstance(node, MLASelfAttentionSubmodules):
                pass  # its gate has a projection of its own
            elif config.switch_heads != "none":
                from megasink.megatron.switch_heads import with_switch_rows

                changes["linear_qkv"] = with_switch_rows(node.linear_qkv)
            elif trailing_rows(config):
                from megasink.megatron.gate_projection import with_gate_rows

                changes["linear_qkv"] = with_gate_rows(node.linear_qkv)
        return dataclasses.replace(node, **changes)
    return node
