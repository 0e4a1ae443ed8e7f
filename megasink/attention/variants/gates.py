"""Shapes and parameter counts derived from the explicit-gate options. Pure Python, no torch.

`options` is any object with the fields of AttentionOptions and GateOptions and Megatron's
``hidden_size``, ``num_attention_heads``, ``num_query_groups`` and ``kv_channels``: a transformer
config, or validated arguments.
"""

from dataclasses import dataclass
from typing import Any

from megasink.attention.variants import variant

# Divisible by every common tensor-parallel size; at TP=8 the GEMMs still have a multiple of 16
# columns, which fp8 needs. Independent of the layout, because the width is part of the model.
FFN_MULTIPLE = 128


def gates_explicitly(options: Any) -> bool:
    """Return whether the layers have an explicit gate."""
    return variant(options.attention_variant).explicit_gate


def changes_self_attention(options: Any) -> bool:
    """Return whether SelfAttention needs a gate or a norm of the SDPA output."""
    return gates_explicitly(options) or options.sdpa_output_norm != "none"


def counts_heads(options: Any) -> bool:
    """Return whether the mean of the explicit gate is the head importance (P0.3, P0.11).

    True if the gate scales the output of a head by a factor between 0 and 1. Any other gate (added,
    unbounded, or not on the SDPA output) does not tell how much of the head passes through; the
    importance is then that of the underlying softmax, the mean of 1 - A_i0.
    """
    return (
        gates_explicitly(options)
        and options.gate_position == "sdpa"
        and options.gate_operation == "multiply"
        and options.gate_activation in ("sigmoid", "ns-sigmoid")
    )


def is_megatrons_output_gate(options: Any) -> bool:
    """Return whether the gate is Megatron's ``attention_output_gate``, with its weight layout.

    linear_qkv then has the rows [q | gate | k | v] per group, and Megatron checkpoints load as is.
    """
    return (
        counts_heads(options)
        and options.gate_granularity == "elementwise"
        and options.gate_activation == "sigmoid"
        and options.gate_input == "hidden"
        and not options.gate_shared_heads
    )


def gate_shape(options: Any) -> tuple[int, int]:
    """Return (heads, scores per head and token) over all ranks (P1 Table 1).

    Value and key gates have one head per group; the gate of the layer output is a single head of
    width hidden_size.
    """
    if options.gate_position == "output":
        return 1, options.hidden_size
    grouped = options.gate_position in ("value", "key")
    heads = options.num_query_groups if grouped else options.num_attention_heads
    return heads, options.kv_channels if options.gate_granularity == "elementwise" else 1


def trailing_rows(options: Any) -> int:
    """Return the number of gate rows at the end of linear_qkv, over all tensor-parallel ranks."""
    own_place = (
        not gates_explicitly(options)
        or options.gate_input == "none"
        or options.gate_position == "output"
        or is_megatrons_output_gate(options)
    )
    heads, width = gate_shape(options)
    return 0 if own_place else heads * width


def parameters_per_layer(options: Any, *, bias: bool = False) -> int:
    """Return the parameters that the gate and the SDPA output norm add to a layer.

    Args:
        bias: Whether linear_qkv, and so the gate projection, has a bias.
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
    """The FFN width at which a gated layer matches the parameter count of an ungated one (P1.21).

    Attributes:
        extra: Parameters that the gate adds to a layer.
        before, after: FFN width without and with the gate.
        exact: Unrounded width at which the counts match exactly.
        left_over: Parameters per layer in excess of the ungated layer; negative if fewer.
    """

    extra: int
    before: int
    after: int
    exact: float
    left_over: int

    def __str__(self) -> str:
        return (
            f"the gate adds {self.extra:,} parameters per layer, so the FFN width is "
            f"{self.after} instead of {self.before} ({self.exact:.1f} rounded to a multiple of "
            f"{FFN_MULTIPLE}), which leaves {self.left_over:+,} parameters per layer"
        )


def matched_ffn_width(
    ffn_width: int,
    extra: int,
    hidden_size: int,
    *,
    gated_linear_unit: bool,
    bias: bool = False,
) -> MatchedWidth:
    """Round ffn_width - extra / (parameters per unit of width) to a multiple of FFN_MULTIPLE.

    Args:
        ffn_width: FFN width of the ungated model.
        extra: Parameters that the gate adds to a layer.
        gated_linear_unit: Whether the FFN has three matrices (SwiGLU) instead of two.
        bias: Whether the first linear layer of the FFN has a bias.

    Raises:
        ValueError: The remaining width is less than FFN_MULTIPLE.
    """
    columns = 2 if gated_linear_unit else 1
    per_unit = (columns + 1) * hidden_size + (columns if bias else 0)
    exact = ffn_width - extra / per_unit
    after = round(exact / FFN_MULTIPLE) * FFN_MULTIPLE
    if after < FFN_MULTIPLE:
        raise ValueError(
            f"the gate adds {extra:,} parameters per layer, as many as {extra / per_unit:.1f} of "
            f"the {ffn_width} columns of the FFN: less than {FFN_MULTIPLE} would be left"
        )
    left_over = extra - (ffn_width - after) * per_unit
    return MatchedWidth(extra, ffn_width, after, exact, left_over)
