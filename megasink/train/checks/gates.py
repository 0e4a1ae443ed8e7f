"""Checks of explicit gates."""

from argparse import Namespace
from typing import get_args, get_type_hints

from megasink import gate_options
from megasink.config import GateOptions
from megasink.errors import ConfigError


def problems(args: Namespace) -> list[str]:
    """Return one message per problem."""
    found = _unknown_names(args)
    if getattr(args, "attention_output_gate", False):
        found.append(
            "--attention-output-gate: say it with --attention-variant gated "
            "--gate-granularity elementwise (the same weights in the same places)"
        )
    if found:
        return found
    if gate_options.gates_explicitly(args):
        found += _of_the_gate(args)
    if args.match_ffn_width:
        found += _width(args)
    return found


def _unknown_names(args: Namespace) -> list[str]:
    found = []
    for name, kind in get_type_hints(GateOptions).items():
        names = get_args(kind)
        if names and getattr(args, name) not in names:
            found.append(
                f"--{name.replace('_', '-')} {getattr(args, name)!r} is unknown: "
                f"choose {', '.join(names)}"
            )
    return found


def _of_the_gate(args: Namespace) -> list[str]:
    found = []
    position, ranks = args.gate_position, args.tensor_model_parallel_size
    if position == "output":
        if args.gate_granularity == "headwise":
            found.append(
                "--gate-position output is after the heads are mixed, so it has no headwise gate: "
                "add --gate-granularity elementwise"
            )
        if args.gate_shared_heads:
            found.append(
                "--gate-shared-heads with --gate-position output: it has no heads; drop the flag, "
                "or gate the sdpa output"
            )
        if args.transformer_impl == "transformer_engine" and args.gate_input == "hidden":
            found.append(
                "--gate-position output needs the normed hidden state, which TransformerEngine "
                "keeps inside linear_qkv: use --transformer-impl local or --gate-position sdpa"
            )
    # Such a norm cancels a factor per head, or under LayerNorm a constant summand.
    removed = args.gate_operation == "multiply" or args.normalization == "LayerNorm"
    normed = position in ("key", "query") and (args.qk_layernorm or args.qk_l2_norm)
    if normed and removed and args.gate_granularity == "headwise":
        found.append(
            f"--gate-position {position} with a headwise gate and --qk-layernorm: the norm takes "
            "the gate out again: add --gate-granularity elementwise or drop the norm"
        )
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if position in ("value", "key", "query") and groups and groups < ranks:
        found.append(
            f"--gate-position {position} with {groups} key/value groups on "
            f"--tensor-model-parallel-size {ranks}: a rank has part of a group there; use at most "
            f"{groups} ranks or --gate-position sdpa"
        )
    if not args.num_attention_heads or not args.hidden_size:
        return found
    rows = gate_options.trailing_rows(with_shape(args))
    if rows and "muon" in (args.optimizer or ""):
        found.append(
            f"--optimizer {args.optimizer} takes linear_qkv apart by heads and does not know the "
            "gate rows in it: use adam, or --gate-granularity elementwise with sigmoid, multiply "
            "and heads that do not share the gate"
        )
    if rows and (args.fp8 or args.fp4) and rows // ranks % 16:
        found.append(
            f"fp8 and fp4 need linear_qkv in multiples of 16 rows and the gate adds "
            f"{rows // ranks} to each rank: use --gate-granularity elementwise, bf16, or another "
            "--tensor-model-parallel-size"
        )
    return found


def _width(args: Namespace) -> list[str]:
    if not gate_options.changes_self_attention(args):
        return ["--match-ffn-width without a gate has nothing to match: drop the flag"]
    if args.num_experts:
        return ["--match-ffn-width is for dense models: the FFN of --num-experts has many widths"]
    if gate_options.FFN_MULTIPLE % args.tensor_model_parallel_size:
        return [
            f"--match-ffn-width rounds to multiples of {gate_options.FFN_MULTIPLE}, which "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} does not divide: use "
            "a power of two, or give --ffn-hidden-size yourself"
        ]
    return []


def with_shape(args: Namespace) -> Namespace:
    """Return the arguments with what Megatron derives later: groups and head dim."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    head_dim = args.kv_channels or args.hidden_size // args.num_attention_heads
    return Namespace(**{**vars(args), "num_query_groups": groups, "kv_channels": head_dim})


def match_ffn_width(args: Namespace) -> None:
    """Narrow the FFN to offset the gate's parameters (P1.21); rank 0 prints the change.

    Raises:
        ConfigError: no width is left.
    """
    bias = args.add_bias_linear or args.add_qkv_bias
    extra = gate_options.parameters_per_layer(with_shape(args), bias=bias)
    try:
        matched = gate_options.matched_ffn_width(
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
