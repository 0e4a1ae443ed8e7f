"""Megatron's TransformerConfig with megasink's options."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megasink.config import (
    AttentionOptions,
    BiasOptions,
    BlockOptions,
    GateOptions,
    HeadBalanceOptions,
    LoraOptions,
    NanochatOptions,
    PositionOptions,
    SimilarityOptions,
)
from megasink.gate_options import is_megatrons_output_gate
from megasink.layers.finalize import finalize_model_grads
from megasink.layers.statistics import ModelStatistics
from megasink.variants import variant
from megasink.variants.layers import layers_with_variant, without_variant

# The function of each FFN activation, and whether the FFN is a gated linear unit.
FFN_ACTIVATIONS = {
    "relu": (F.relu, False),
    "gelu": (F.gelu, False),
    "silu": (F.silu, False),
    "reglu": (F.relu, True),
    "geglu": (F.gelu, True),
    "swiglu": (F.silu, True),
}


@dataclass(kw_only=True)
class MegasinkTransformerConfig(
    LoraOptions,
    HeadBalanceOptions,
    NanochatOptions,
    BlockOptions,
    PositionOptions,
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
        statistics: Statistics of the model built from this config. Not a dataclass field, so it is
            not serialized or copied by ``dataclasses.replace``.

    Raises:
        ValueError: The head-balance loss is on for a similarity without a differentiable gate or a
            variant without a slot value, or the heads or groups of a variant's parameter are not
            divisible by the tensor-parallel ranks, or ``attention_variant_layers`` does not fit the
            number of layers.
        UserError: The attention variant is not registered.
    """

    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128

    def __post_init__(self) -> None:
        record = variant(self.attention_variant)
        # Megatron's inference reads it; layers/inference_guard.py rejects unsupported models.
        self.softmax_type = record.softmax_type
        if self.head_balance_coeff and self.attention_similarity != "softmax":
            raise ValueError(
                f"attention_similarity {self.attention_similarity!r} has no gate with a gradient: "
                "set head_balance_coeff to 0"
            )
        if self.head_balance_coeff and record.slot_value is None:
            raise ValueError(
                f"attention variant {record.name!r} has no slot_value, against which the gradient "
                "of the head-balance loss is measured: set head_balance_coeff to 0"
            )
        if self.ffn_activation is not None:
            self.activation_func, self.gated_linear_unit = FFN_ACTIVATIONS[self.ffn_activation]
            # Megatron's other fused kernels only have the tanh approximation of gelu.
            self.bias_activation_fusion &= self.ffn_activation == "swiglu"
        if self.zero_init_outputs:
            self.output_layer_init_method = torch.nn.init.zeros_
        self.statistics = ModelStatistics(self.num_layers, self.num_attention_heads)
        if self.head_balance_coeff:
            self.experimental_attention_variant_loss_scale_func = self.statistics.set_loss_scale
        self.finalize_model_grads_func = finalize_model_grads
        if is_megatrons_output_gate(self):
            self.attention_output_gate = True
        # Megatron then asks for the config of each layer, and numbers the layers in checkpoints.
        self.heterogeneous_block_specs = not all(layers_with_variant(self))
        super().__post_init__()
        for parameter in record.parameters:
            parameter.local_shape(self, self.tensor_model_parallel_size)

    def get_config_for_layer(self, layer_number: int) -> "MegasinkTransformerConfig":
        """Return the config of a layer, which shares this model's statistics.

        Called by Megatron (megatron/core/transformer/transformer_block.py:336).

        Args:
            layer_number: 1-based index in the whole model.
        """
        if layers_with_variant(self)[layer_number - 1]:
            return self
        layer = without_variant(self)
        layer.softmax_type = variant(layer.attention_variant).softmax_type
        layer.attention_output_gate = False
        return layer
