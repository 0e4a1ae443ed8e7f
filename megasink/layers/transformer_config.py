"""Megatron's TransformerConfig with the options of megasink."""

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig

from megasink.balance.attach import HeadBalanceScale
from megasink.config import (
    AttentionOptions,
    BiasOptions,
    BlockOptions,
    GateOptions,
    HeadBalanceOptions,
    PositionOptions,
    SimilarityOptions,
)
from megasink.layers.finalize import finalize_model_grads
from megasink.layers.slots import VARIANTS


@dataclass(kw_only=True)
class MegasinkTransformerConfig(
    HeadBalanceOptions,
    BlockOptions,
    PositionOptions,
    GateOptions,
    SimilarityOptions,
    BiasOptions,
    AttentionOptions,
    TransformerConfig,
):
    """TransformerConfig with the options of megasink beside Megatron's fields.

    Raises:
        ValueError: a head-balance loss on a similarity that has no gate to differentiate.
    """

    def __post_init__(self) -> None:
        # Inference and converters decide by it: see layers/slots.py for what it does not cover.
        self.softmax_type = VARIANTS[self.attention_variant].softmax_type
        if self.head_balance_coeff and self.attention_similarity != "softmax":
            raise ValueError(
                f"attention_similarity {self.attention_similarity!r} has no gate with a gradient: "
                "set head_balance_coeff to 0"
            )
        if self.head_balance_coeff:
            # schedules.py:376 calls it for every microbatch on every pipeline stage.
            self.experimental_attention_variant_loss_scale_func = HeadBalanceScale.set
        self.finalize_model_grads_func = finalize_model_grads
        super().__post_init__()
