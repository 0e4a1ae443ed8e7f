"""What the options of an explicit gate come to: scores, rows, parameters. Pure, without torch.

`options` is anything with the fields of AttentionOptions and GateOptions and Megatron's
``hidden_size``, ``num_attention_heads``, ``num_query_groups`` and ``kv_channels``: a transformer
config, or validated arguments.
"""

from dataclasses import dataclass
from typing import Any

from megasink.variants import variant

# Divides by every usual tensor-parallel size and leaves the GEMMs of TP=8 a multiple of 16 columns,
# as fp8 wants. It must not follow the layout: the width is part of the model.
FFN_MULTIPLE = 128


def gates_explicitly(options: Any) -> bool:
    """Whether the layers have an explicit gate."""
    return variant(options.attention_variant).explicit_gate


def changes_self_attention(options: Any) -> bool:
    """Whether Megatron's SelfAttention needs a gate or a norm of the SDPA output in it."""
    return gates_explicitly(options) or options.sdpa_output_norm != "none"


def counts_heads(options: Any) -> bool:
    """Whether the explicit gate is the one whose mean is the head importance (P0.3, P0.11).

    It is where it scales the output of a head by a factor between 0 and 1. Any other gate (added,
    unbounded, or not on the SDPA output) says nothing about how much of the head is let through:
    there the importance stays that of the softmax underneath, the mean of 1 - A_i0.
    """
    return (
        gates_explicitly(options)
        and options.gate_position == "sdpa"
        and options.gate_operation == "multiply"
        and options.gate_activation in ("sigmoid", "ns-sigmoid")
    )


def is_megatrons_output_gate(options: Any) -> bool:
    """Whether the gate is Megatron's ``attention_output_gate``: then so are its weights' places.

    Rows of linear_qkv by group, [q | gate | k | v]: such checkpoints load unchanged.
    """
    return (
        counts_heads(options)
        and options.gate_granularity == "elementwise"
        and options.gate_activation == "sigmoid"
        and options.gate_input == "hidden"
        and not options.gate_shared_heads
    )


def gate_shape(options: Any) -> tuple[int, int]:
    """(heads, scores per head and token) of the whole model (P1 Table 1).

    Value and key gates have one head per group, and the gate of the layer's output is one head as
    wide as the model.
    """
    if options.gate_position == "output":
        return 1, options.hidden_size
    grouped = options.gate_position in ("value", "key")
    heads = options.num_query_groups if grouped else options.num_attention_heads
    return heads, options.kv_channels if options.gate_granularity == "elementwise" else 1


def trailing_rows(options: Any) -> int:
    """Rows that the gate adds at the end of linear_qkv, over all tensor-parallel ranks."""
    own_place = (
        not gates_explicitly(options)
        or options.gate_input == "none"
        or options.gate_position == "output"
        or is_megatrons_output_gate(options)
    )
    heads, width = gate_shape(options)
    return 0 if own_place else heads * width


def parameters_per_layer(options: Any, *, bias: bool = False) -> int:
    """What the gate and the norm of the SDPA output add to a layer.

    Args:
        bias: linear_qkv has a bias; then the gate's projection has one too.
    """
    count = 0
    if gates_explicitly(options):
        heads, width = gate_shape(options)
        inputs = options.hidden_size + bias if options.gate_input == "hidden" else 1
        count += heads * width * inputs
    if options.sdpa_output_norm == "rmsnorm":
        count += options.num_attention_heads * options.kv_channels
    return count


@dataclass(frozen=True)
class MatchedWidth:
    """The FFN width at which a gated layer has the parameters of an ungated one (P1.21).

    Attributes:
        extra: parameters that the gate adds to a layer.
        before, after: FFN width without the gate, and with it.
        exact: the width, not rounded, at which nothing would be left over.
        left_over: parameters per layer above (below, where negative) those of the ungated layer.
    """

    extra: int
    before: int
    after: int
    exact: float
    left_over: int

    def __str__(self) -> str:
        return (
            f"the gate adds {self.extra:,} parameters per layer, so the FFN is "
            f"{self.after} wide instead of {self.before} (exactly {self.exact:.1f}; a multiple of "
            f"{FFN_MULTIPLE}), which leaves {self.left_over:+,} parameters per layer"
        )


def matched_ffn_width(
    ffn_width: int,
    extra: int,
    hidden_size: int,
    *,
    gated_linear_unit: bool,
    bias: bool = False,
    multiple: int = FFN_MULTIPLE,
) -> MatchedWidth:
    """The multiple of `multiple` nearest to ffn_width - extra / (parameters per unit of width).

    Args:
        ffn_width: of the ungated model.
        extra: parameters that the gate adds to a layer.
        gated_linear_unit: three matrices (SwiGLU) in place of two.
        bias: the first linear layer of the FFN has a bias.

    Raises:
        ValueError: no width is left.
    """
    columns = 2 if gated_linear_unit else 1
    per_unit = (columns + 1) * hidden_size + (columns if bias else 0)
    exact = ffn_width - extra / per_unit
    after = round(exact / multiple) * multiple
    if after < multiple:
        raise ValueError(
            f"the gate adds {extra:,} parameters per layer, as many as {extra / per_unit:.1f} of "
            f"the {ffn_width} columns of the FFN: less than {multiple} would be left"
        )
    left_over = extra - (ffn_width - after) * per_unit
    return MatchedWidth(extra, ffn_width, after, exact, left_over)
