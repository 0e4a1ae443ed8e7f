"""Parameters that gates and switch heads add, and the FFN width that compensates for them (P1.21).

`options`: see :mod:`megasink.attention.variants.gate_options`.
"""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from megasink.attention.variants.gate_options import gate_shape, gates_explicitly
from megasink.attention.variants.switch_options import switch_rows
from megasink.errors import ConfigError

# Divisible by every common tensor-parallel size; at TP=8 the GEMMs still have a multiple of 16
# columns, which fp8 needs. Independent of the layout, because the width is part of the model.
FFN_MULTIPLE = 128


def parameters_per_layer(options: Any, *, bias: bool = False) -> int:
    """Return what gate, switch heads and output norm add; `bias`: of linear_qkv."""
    count = switch_rows(options) * options.num_query_groups * (options.hidden_size + bias)
    if gates_explicitly(options):
        heads, width = gate_shape(options)
        inputs = options.hidden_size + bias if options.gate_input == "hidden" else 1
        count += heads * width * inputs
    if options.sdpa_output_norm == "rmsnorm":
        count += options.num_attention_heads * options.kv_channels
    return count


@dataclass(frozen=True)
class MatchedWidth:
    """The FFN width that matches an ungated layer (P1.21); parameters are per layer."""

    extra: int
    before: int
    after: int
    exact: float
    left_over: int

    def __str__(self) -> str:
        return (
            f"gates and experts add {self.extra:,} parameters per layer, so the FFN width is "
            f"{self.after} instead of {self.before} ({self.exact:.1f} rounded to a multiple of "
            f"{FFN_MULTIPLE}): a difference of {self.left_over:+,} parameters per layer remains"
        )


def matched_ffn_width(
    ffn_width: int, extra: int, hidden_size: int, *, gated_linear_unit: bool, bias: bool = False
) -> MatchedWidth:
    """Round ffn_width - `extra` / (parameters per unit of width) to a multiple of FFN_MULTIPLE."""
    columns = 2 if gated_linear_unit else 1
    per_unit = (columns + 1) * hidden_size + (columns if bias else 0)
    exact = ffn_width - extra / per_unit
    after = round(exact / FFN_MULTIPLE) * FFN_MULTIPLE
    if after < FFN_MULTIPLE:
        raise ValueError(
            f"gates and experts add {extra:,} parameters per layer, as many as "
            f"{extra / per_unit:.1f} of the {ffn_width} columns of the FFN, so fewer than "
            f"{FFN_MULTIPLE} columns would remain"
        )
    left_over = extra - (ffn_width - after) * per_unit
    return MatchedWidth(extra, ffn_width, after, exact, left_over)


def with_shape(args: Namespace) -> Namespace:
    """Return the arguments with what Megatron derives later: groups and head dim."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    head_dim = args.kv_channels or args.hidden_size // args.num_attention_heads
    return Namespace(**{**vars(args), "num_query_groups": groups, "kv_channels": head_dim})


def match_ffn_width(args: Namespace) -> None:
    """Narrow the FFN to offset the gate's parameters (P1.21); rank 0 prints the change."""
    bias = args.add_bias_linear or args.add_qkv_bias
    extra = parameters_per_layer(with_shape(args), bias=bias)
    try:
        matched = matched_ffn_width(
            args.ffn_hidden_size,
            extra,
            args.hidden_size,
            gated_linear_unit=args.swiglu or args.quick_geglu,
            bias=args.add_bias_linear,
        )
    except ValueError as error:
        raise ConfigError([f"--match-ffn-width: {error}; drop the flag"]) from error
    args.ffn_hidden_size = matched.after
    if args.rank == 0:
        print(f"--match-ffn-width: {matched}", flush=True)
