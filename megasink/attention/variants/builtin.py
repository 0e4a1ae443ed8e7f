"""The built-in variants, from P0, P1 and P2.

Shapes: B batch, H query heads and G key/value groups of this tensor-parallel rank, T queries,
S keys, D head dim.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megasink.attention.variants.variant_record import (
    SINK_WEIGHT,
    ZERO_GATES,
    Export,
    Parameter,
    Parameters,
    Variant,
    always,
    first_value,
    no_slot,
    zero_value,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megasink.attention import AttentionOutput

# Megatron's inference and converters know the sink's parameter under this name.
SOFTMAX_OFFSET, KEY_BIAS, VALUE_BIAS = "softmax_offset", "key_bias", "value_bias"


def _add_value_bias(
    config: Any, parameters: Parameters, *tensors: "Tensor", **options: Any
) -> "AttentionOutput":
    from megasink.attention import attention
    from megasink.attention.key_value_biases import value_bias

    result = attention(*tensors, **options)
    out_BHTD = (result.out_BHTD + value_bias(config, parameters)).to(result.out_BHTD.dtype)
    return result._replace(out_BHTD=out_BHTD)


def _sink_logit(
    config: Any, parameters: Parameters, query_BHTD: "Tensor", scale: float
) -> "Tensor":
    return parameters[SOFTMAX_OFFSET][None, :, None]


def _zero_logit(
    config: Any, parameters: Parameters, query_BHTD: "Tensor", scale: float
) -> "Tensor":
    from megasink.attention.layout import statistics_dtype

    return query_BHTD.new_zeros(1, 1, 1, dtype=statistics_dtype(query_BHTD.dtype))


def _of_biases(name: str) -> Callable[..., Any]:
    """Return a function of key_value_biases.py, which is imported when it is first called."""

    def call(*args: Any) -> Any:
        from megasink.attention import key_value_biases

        return getattr(key_value_biases, name)(*args)

    return call


def _bias(name: str) -> Parameter:
    """Define a bias per query head, or one [D] for all heads of the layer (P2.29).

    With GQA too: a bias per group would belong to several ranks. The std is from P2's code."""

    def shape(config: Any) -> tuple[int, ...]:
        width = (config.kv_channels,)
        return width if config.bias_shared_heads else (config.num_attention_heads, *width)

    return Parameter(
        name=name, shape=shape, sharded=lambda config: not config.bias_shared_heads, std=0.02
    )


_OFFSET = Parameter(
    name=SOFTMAX_OFFSET,
    shape=lambda config: (config.num_attention_heads,),
    initial=lambda config: config.softmax_offset_init,
)
_GATE = (
    *("gate_position", "gate_granularity", "gate_shared_heads"),
    *("gate_operation", "gate_activation", "gate_input"),
)
_FIXED_VALUE = ("bias_fixed_value", "bias_fixed_value_norm")

VARIANTS = (
    Variant(
        name="vanilla",
        description="softmax attention (P0.1)",
        slot_logit=no_slot,
        slot_value=first_value,
        dynamic_inference=True,
        similarity=True,
        norm_keeps_gate=always,
        export=Export(modelling_file=True),
    ),
    Variant(
        name="sink",
        description="one learnable logit per head in the denominator of the softmax (P0.2)",
        slot_logit=_sink_logit,
        slot_value=zero_value,
        parameters=(_OFFSET,),
        logs_slot_logit=True,
        softmax_type="learnable",
        dynamic_inference=True,
        export=Export(sink_tensor=True, modelling_file=True, start=SINK_WEIGHT),
    ),
    Variant(
        name="off-by-one",
        description="sink attention with the logit fixed at 0",
        slot_logit=_zero_logit,
        slot_value=zero_value,
        softmax_type="off-by-one",
        dynamic_inference=True,
        export=Export(sink_tensor=True, modelling_file=True),
    ),
    Variant(
        name="gated",
        description="softmax attention with an explicit gate (P0.3, P1), by default one sigmoid "
        "per head and token",
        slot_logit=no_slot,
        slot_value=first_value,
        explicit_gate=True,  # in megatron/gated_attention.py
        norm_keeps_gate=always,
        options=frozenset(_GATE),
        export=Export(
            kinds=("headwise", "elementwise"),
            kind_option="gate_granularity",
            modelling_file=True,
            start=ZERO_GATES,
        ),
    ),
    Variant(
        name="k-bias",
        description="one learnable key per head with value zero: a sink whose logit depends on the "
        "query (P2.25)",
        slot_logit=_of_biases("key_bias_logit"),
        slot_value=_of_biases("fixed_value"),
        parameters=(_bias(KEY_BIAS),),
        # A key with value 0 scales the whole output, like a sink.
        norm_keeps_gate=lambda config: config.bias_fixed_value != "none",
        options=frozenset({"bias_shared_heads", *_FIXED_VALUE}),
        export=Export(modelling_file=True, tensors={KEY_BIAS: KEY_BIAS}),
    ),
    Variant(
        name="kv-bias",
        description="one learnable key and value per head (P2.24)",
        slot_logit=_of_biases("key_bias_logit"),
        slot_value=_of_biases("value_bias"),
        parameters=(_bias(KEY_BIAS), _bias(VALUE_BIAS)),
        norm_keeps_gate=always,
        options=frozenset({"bias_shared_heads"}),
        export=Export(modelling_file=True, tensors={KEY_BIAS: KEY_BIAS, VALUE_BIAS: VALUE_BIAS}),
    ),
    Variant(
        name="v-bias",
        description="a learnable vector added to each head's output (P2.26)",
        attend=_add_value_bias,
        slot_logit=no_slot,
        slot_value=_of_biases("shifted_value"),
        parameters=(_bias(VALUE_BIAS),),
        norm_keeps_gate=always,
        options=frozenset({"bias_shared_heads"}),
        export=Export(modelling_file=True, tensors={VALUE_BIAS: VALUE_BIAS}),
    ),
)
