"""Build the model configuration for Megatron's training loop from arguments."""

from argparse import Namespace

from megatron.training.argument_utils import core_transformer_config_from_args, gpt_config_from_args

from megasink.checkpoint.vocabulary import counted_rows
from megasink.layers.builder import MegasinkGPTConfig
from megasink.layers.transformer_config import MegasinkTransformerConfig
from megasink.specs import block_spec


def model_config(args: Namespace) -> MegasinkGPTConfig:
    """Return the GPT configuration, with our layers; initial weights depend only on the seed."""
    transformer = core_transformer_config_from_args(args, MegasinkTransformerConfig)
    config: MegasinkGPTConfig = gpt_config_from_args(
        args, config=transformer, model_config_cls=MegasinkGPTConfig
    )
    config.transformer_layer_spec = block_spec
    config.init_seed = args.seed
    config.tokens = counted_rows(vars(args))
    # Upstream ignores --rope-scaling-factor and leaves it at 8 (argument_utils.py:464).
    config.rope_scaling_factor = args.rope_scaling_factor
    return config
