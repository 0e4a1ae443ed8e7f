"""Arguments -> the model configuration that Megatron's training loop builds from."""

from argparse import Namespace

from megatron.training.argument_utils import core_transformer_config_from_args, gpt_config_from_args

from megasink.checkpoint.vocabulary import counted_rows
from megasink.layers.builder import MegasinkGPTConfig
from megasink.layers.transformer_config import MegasinkTransformerConfig
from megasink.specs import block_spec


def model_config(args: Namespace) -> MegasinkGPTConfig:
    """The GPT of these arguments, with our layers; its initial weights depend on the seed only."""
    transformer = core_transformer_config_from_args(args, MegasinkTransformerConfig)
    config: MegasinkGPTConfig = gpt_config_from_args(
        args, config=transformer, model_config_cls=MegasinkGPTConfig
    )
    config.transformer_layer_spec = block_spec
    config.init_seed = args.seed
    config.tokens = counted_rows(vars(args))
    # Upstream leaves it at 8 whatever --rope-scaling-factor says (argument_utils.py:464).
    config.rope_scaling_factor = args.rope_scaling_factor
    return config
