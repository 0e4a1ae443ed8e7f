"""Build the model configuration for Megatron's training loop from arguments."""

from argparse import Namespace

from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    hybrid_config_from_args,
)

from megasink.megatron import layer_spec
from megasink.megatron.config import MegasinkTransformerConfig
from megasink.megatron.hybrid import MegasinkHybridConfig
from megasink.megatron.hybrid_specs import hybrid_spec
from megasink.megatron.model import MegasinkGPTConfig
from megasink.megatron.vocabulary import counted_rows

ModelConfig = MegasinkGPTConfig | MegasinkHybridConfig


def model_config(args: Namespace) -> ModelConfig:
    """Return the model's configuration, with our layers; initial weights depend only on the seed.

    As in Megatron, --hybrid-layer-pattern makes it a HybridModel.
    """
    transformer = core_transformer_config_from_args(args, MegasinkTransformerConfig)
    config: ModelConfig
    if args.hybrid_layer_pattern is not None:
        config = hybrid_config_from_args(
            args, config=transformer, model_config_cls=MegasinkHybridConfig
        )
        config.hybrid_stack_spec = hybrid_spec(transformer)
    else:
        config = gpt_config_from_args(args, config=transformer, model_config_cls=MegasinkGPTConfig)
        config.transformer_layer_spec = layer_spec
        # Upstream ignores --rope-scaling-factor and leaves it at 8 (argument_utils.py:464).
        config.rope_scaling_factor = args.rope_scaling_factor
    config.init_seed = args.seed
    config.tokens = counted_rows(vars(args))
    return config
