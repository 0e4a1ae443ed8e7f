"""Checks of explicit gates."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.attention.variants import gates as gate_options
from megasink.errors import ConfigError
from megasink.training import ffn_width


def problems(args: Namespace) -> Iterator[str]:
    if args.attention_output_gate:
        yield (
            "--attention-output-gate: use --attention-variant gated --gate-granularity elementwise "
            "instead (the same weights in the same places)"
        )
        return
    if gate_options.gates_explicitly(args):
        yield from _of_the_gate(args)
    if args.match_ffn_width:
        yield from _width(args)


def _of_the_gate(args: Namespace) -> Iterator[str]:
    position, ranks = args.gate_position, args.tensor_model_parallel_size
    headwise = args.gate_granularity == "headwise"
    if position == "output" and headwise:
        yield (
            "--gate-position output comes after the heads are mixed, so its gate cannot be "
            "headwise: add --gate-granularity elementwise"
        )
    if position == "output" and args.gate_shared_heads:
        yield (
            "--gate-shared-heads with --gate-position output, which has no heads: drop the flag, "
            "or use --gate-position sdpa"
        )
    # Such a norm cancels a factor per head, or under LayerNorm a constant summand.
    removed = args.gate_operation == "multiply" or args.normalization == "LayerNorm"
    normed = position in ("key", "query") and (args.qk_layernorm or args.qk_l2_norm)
    if normed and removed and headwise:
        yield (
            f"--gate-position {position} with a headwise gate and --qk-layernorm: the norm cancels "
            "the gate: add --gate-granularity elementwise or drop the norm"
        )
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if position in ("value", "key", "query") and groups and groups < ranks:
        yield (
            f"--gate-position {position} with {groups} key/value groups on "
            f"--tensor-model-parallel-size {ranks}: each rank has only part of a group; use at "
            f"most {groups} ranks or --gate-position sdpa"
        )


def _width(args: Namespace) -> Iterator[str]:
    ranks = args.tensor_model_parallel_size
    if not gate_options.changes_self_attention(args):
        yield "--match-ffn-width without a gate has nothing to match: drop the flag"
    elif args.num_experts:
        yield "--match-ffn-width supports only dense models: drop it, or drop --num-experts"
    elif ffn_width.FFN_MULTIPLE % ranks:
        yield (
            f"--match-ffn-width rounds to multiples of {ffn_width.FFN_MULTIPLE}, which are not "
            f"divisible by --tensor-model-parallel-size {ranks}: use a power of two, or choose "
            "--ffn-hidden-size yourself"
        )


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
    extra = ffn_width.parameters_per_layer(with_shape(args), bias=bias)
    try:
        matched = ffn_width.matched_ffn_width(
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
