"""Build the model configuration for Megatron's training loop from arguments."""

import copy
import itertools
from argparse import Namespace

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.utils import mup_scaled_init_method_normal, scaled_init_method_normal
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    hybrid_config_from_args,
)

from megasink.megatron.block_stack import block_stack_spec
from megasink.megatron.config import MegasinkTransformerConfig
from megasink.megatron.embedding_rows import counted_rows
from megasink.megatron.hybrid_pattern import (
    PREDICTION,
    STAGE,
    blocks_of,
    gpt_blocks,
    layers_of,
)
from megasink.megatron.model import MegasinkModelConfig


def model_config(args: Namespace) -> MegasinkModelConfig:
    """Return the model's configuration, with our layers; initial weights depend only on the seed.

    Without --hybrid-layer-pattern, it has the pattern of the GPT model that other flags describe.
    """
    given = args.hybrid_layer_pattern
    counted = args if given is None else _by_block(args, given)
    transformer = _transformer_config(counted)
    if given is None:
        pattern = pattern_of_blocks(transformer)
    else:
        pattern = given.partition(PREDICTION)[0] + _predicted(transformer)
        _scale_outputs(transformer, len(layers_of(given)), args.init_method_xavier_uniform)
    config: MegasinkModelConfig = hybrid_config_from_args(
        args, config=transformer, model_config_cls=MegasinkModelConfig
    )
    config.hybrid_layer_pattern = pattern
    config.hybrid_stack_spec = block_stack_spec(transformer, pattern)
    config.rope_scaling = args.use_rope_scaling
    config.rope_scaling_factor = args.rope_scaling_factor
    config.init_seed = args.seed
    config.tokens = counted_rows(vars(args))
    return config


def _transformer_config(args: Namespace) -> MegasinkTransformerConfig:
    if not args.multi_latent_attention:
        config: MegasinkTransformerConfig = core_transformer_config_from_args(
            args, MegasinkTransformerConfig
        )
        return config
    from megasink.megatron.latent_config import latent_config

    return latent_config(args)


def _scale_outputs(config: MegasinkTransformerConfig, layers: int, xavier: bool) -> None:
    """Draw initial output weights as Megatron does for a pattern: by its layers, not its blocks."""
    if xavier or config.zero_init_outputs or layers == 2 * config.num_layers:
        return
    std, width = config.init_method_std, config.mup_width_mult
    config.output_layer_init_method = (
        mup_scaled_init_method_normal(std, layers, width, multiplier=1.0)
        if config.use_mup
        else scaled_init_method_normal(std, layers, multiplier=1.0)
    )


def _by_block(args: Namespace, pattern: str) -> Namespace:
    """Return a copy of arguments with an entry for each block where they have one for each layer.

    With --hybrid-layer-pattern, flags by layer count the layers of the pattern.
    """
    counted, blocks = copy.copy(args), blocks_of(pattern)
    counted.hybrid_layer_pattern, counted.num_layers = None, len(blocks)
    layers = range(1, len(layers_of(pattern)) + 1)
    skipped, unrotated = args.window_attn_skip_freq, args.no_rope_freq
    if isinstance(skipped, int):
        skipped = [int(layer % skipped != 0) for layer in layers]
    if isinstance(unrotated, int):
        unrotated = [int(layer % unrotated == 0) for layer in layers]
    firsts = [next(layer for layer in block if layer is not None) for block in blocks]
    for name, values in (
        ("window_attn_skip_freq", skipped),
        ("no_rope_freq", unrotated),
        ("cp_comm_type", args.cp_comm_type),
    ):
        if isinstance(values, list) and len(values) == len(layers):
            setattr(counted, name, [values[layer] for layer in firsts])
    return counted


def pattern_of_blocks(config: MegasinkTransformerConfig) -> str:
    """Return the pattern of a GPT model: its blocks, stages and layers that predict more tokens.

    The stages move from the config into the pattern: Megatron refuses both together.
    """
    blocks = iter(_gpt_blocks(config))
    stages = ["".join(itertools.islice(blocks, size)) for size in _stages(config)]
    config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
    return STAGE.join(stages) + _predicted(config)


def _predicted(config: MegasinkTransformerConfig) -> str:
    """Return the end of a pattern: a last block for each further predicted token."""
    return (config.mtp_num_layers or 0) * (PREDICTION + _gpt_blocks(config)[-1])


def _gpt_blocks(config: MegasinkTransformerConfig) -> list[str]:
    counts = config.num_layers, config.num_moe_experts
    return gpt_blocks(*counts, config.moe_layer_freq, latent=config.multi_latent_attention)


def _stages(config: MegasinkTransformerConfig) -> list[int]:
    """Return the number of blocks of each stage, in the order in which a token passes them."""
    virtual = config.virtual_pipeline_model_parallel_size
    layout = config.pipeline_model_parallel_layout
    places = [
        (chunk, rank)
        for chunk in (range(virtual) if virtual else [None])
        for rank in range(config.pipeline_model_parallel_size)
    ]
    if layout is not None:
        return [layout.layout[rank][chunk or 0].count(LayerType.decoder) for chunk, rank in places]
    return [get_num_layers_to_build(config, chunk, rank) for chunk, rank in places]
