"""Interpret the options of explicit gates, and compute their shapes. Pure Python, no torch.

`options` is any object with the fields of AttentionOptions and GateOptions and Megatron's
``hidden_size``, ``num_attention_heads``, ``num_query_groups`` and ``kv_channels``: a transformer
config, or validated arguments.
"""

from typing import Any

from megasink.attention.variants import Variant, variant


def gates_explicitly(options: Any) -> bool:
    """Return whether the layers have an explicit gate."""
    return variant(options.attention_variant).explicit_gate


def is_latent(options: Any) -> bool:
    """Return whether the layers have latent attention, whose gate is a projection of its own."""
    return getattr(options, "multi_latent_attention", False)


def fits_latent(record: Variant, options: Any) -> bool:
    """Return whether a variant has no parameter of the width of heads, which latent ones change."""
    heads = options.num_attention_heads
    return record.attend is None and all(
        parameter.shape(options) == (heads,) for parameter in record.parameters if heads
    )


def changes_self_attention(options: Any) -> bool:
    """Return whether SelfAttention needs a gate or a norm of the SDPA output."""
    return gates_explicitly(options) or options.sdpa_output_norm != "none"


def counts_heads(options: Any) -> bool:
    """Return whether the mean of the explicit gate is the head importance (P0.3, P0.11).

    True if the gate scales the output of a head by a factor between 0 and 1. Any other gate (added,
    unbounded, or not on the SDPA output) does not show how much of the head passes through; the
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
        and not is_latent(options)
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
    if options.gate_granularity != "elementwise":
        return heads, 1
    return heads, options.v_head_dim if is_latent(options) else options.kv_channels


def trailing_rows(options: Any) -> int:
    """Return the number of gate rows at the end of linear_qkv, over all tensor-parallel ranks."""
    own_place = (
        not gates_explicitly(options)
        or is_latent(options)
        or options.gate_input == "none"
        or options.gate_position == "output"
        or is_megatrons_output_gate(options)
    )
    heads, width = gate_shape(options)
    return 0 if own_place else heads * width
