"""The layer spec of a GPT model: Megatron's own, with megasink's attention."""

import dataclasses
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megasink.megatron.spec_modules import our_block, with_options, with_our_modules


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
    configs = map(layer_config, range(first, first + len(layers)))
    ours = our_block(map(with_our_modules, layers, configs), norm, transformer)
    if transformer.mtp_num_layers and ours.layer_specs:
        from megasink.megatron.multi_token_prediction import counted_once

        *others, last = ours.layer_specs
        ours = dataclasses.replace(ours, layer_specs=[*others, counted_once(last)])
    return ours
