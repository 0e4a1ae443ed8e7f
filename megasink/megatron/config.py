"""Megatron's TransformerConfig with megasink's options."""

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig

from megasink.attention.variants import variant
from megasink.attention.variants.variant_layers import layers_with_variant, without_variant
from megasink.config import (
    AttentionOptions,
    BiasOptions,
    BlockOptions,
    GateOptions,
    HeadBalanceOptions,
    NanochatOptions,
    PositionOptions,
    SimilarityOptions,
    SwitchOptions,
)
from megasink.megatron.head_balance import HeadBalance
from megasink.megatron.model_options import apply_options, check_parameters


@dataclass(kw_only=True)
class MegasinkTransformerConfig(
    HeadBalanceOptions,
    NanochatOptions,
    BlockOptions,
    PositionOptions,
    SwitchOptions,
    GateOptions,
    SimilarityOptions,
    BiasOptions,
    AttentionOptions,
    TransformerConfig,
):
    """TransformerConfig with megasink's options in addition to Megatron's fields.

    Attributes:
        relative_attention_num_buckets, relative_attention_max_distance: Megatron's flags, which are
            missing from its own TransformerConfig.
        statistics: The head-balance loss and other statistics of the model built from this config.
            Not a dataclass field, so it is not serialized or copied by ``dataclasses.replace``.
    """

    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128

    def __post_init__(self) -> None:
        apply_options(self)
        # Megatron then asks for the config of each layer, and numbers the layers in checkpoints.
        self.heterogeneous_block_specs |= not all(layers_with_variant(self))
        HeadBalance(self).install()
        super().__post_init__()
        check_parameters(self)

    def get_config_for_layer(self, layer_number: int) -> "MegasinkTransformerConfig":
        """Return the config of a layer (1-based in the whole model), with this model's statistics.

        Called by Megatron (megatron/core/transformer/transformer_block.py:336).
        """
        if layers_with_variant(self)[layer_number - 1]:
            return self
        layer = without_variant(self)
        layer.softmax_type = variant(layer.attention_variant).softmax_type
        layer.attention_output_gate = False
        return layer
