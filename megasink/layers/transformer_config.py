"""Megatron's TransformerConfig with the options of megasink."""

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig

from megasink.balance.attach import HeadBalanceScale
from megasink.config import (
    AttentionOptions,
    BlockOptions,
    GateOptions,
    HeadBalanceOptions,
    PositionOptions,
)
from megasink.layers.finalize import finalize_model_grads

# Megatron's own name for each variant: inference and converters decide by config.softmax_type.
SOFTMAX_TYPE = {"vanilla": "vanilla", "sink": "learnable", "off-by-one": "off-by-one"}


@dataclass(kw_only=True)
class MegasinkTransformerConfig(
    HeadBalanceOptions,
    BlockOptions,
    PositionOptions,
    GateOptions,
    AttentionOptions,
    TransformerConfig,
):
    """TransformerConfig with the options of megasink beside Megatron's fields.

    Attributes:
        relative_attention_num_buckets, relative_attention_max_distance: Megatron's flags, which its
            own TransformerConfig does not hold.
    """

    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128

    def __post_init__(self) -> None:
        self.softmax_type = SOFTMAX_TYPE[self.attention_variant]
        if self.head_balance_coeff:
            # schedules.py:376 calls it for every microbatch on every pipeline stage.
            self.experimental_attention_variant_loss_scale_func = HeadBalanceScale.set
        self.finalize_model_grads_func = finalize_model_grads
        super().__post_init__()
