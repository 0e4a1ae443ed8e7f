"""Megatron's TransformerConfig with the options of megasink."""

from dataclasses import dataclass

import torch.nn.functional as F
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
from megasink.gate_options import is_megatrons_output_gate
from megasink.layers.finalize import finalize_model_grads
from megasink.variants import variant

# The function of each FFN activation, and whether it is applied to the gate of a gated unit.
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

    Attributes:
        relative_attention_num_buckets, relative_attention_max_distance: Megatron's flags, which its
            own TransformerConfig does not hold.

    Raises:
        ValueError: a head-balance loss on a similarity that has no gate to differentiate, or on a
            variant whose record gives no slot value; heads or groups of a variant's parameter that
            the tensor-parallel ranks do not divide.
        UserError: an attention variant that nobody has registered.
    """

    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128

    def __post_init__(self) -> None:
        record = variant(self.attention_variant)
        # Megatron's inference decides by it; layers/inference_guard.py refuses what it leaves out.
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
            # The other fused kernels of Megatron know tanh's approximation of gelu alone.
            self.bias_activation_fusion &= self.ffn_activation == "swiglu"
        if self.head_balance_coeff:
            # schedules.py:376 calls it for every microbatch on every pipeline stage.
            self.experimental_attention_variant_loss_scale_func = HeadBalanceScale.set
        self.finalize_model_grads_func = finalize_model_grads
        if is_megatrons_output_gate(self):
            self.attention_output_gate = True
        super().__post_init__()
        for parameter in record.parameters:
            parameter.local_shape(self, self.tensor_model_parallel_size)
