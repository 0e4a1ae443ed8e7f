"""Checks of context parallelism."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.config import COMM_TYPES


def problems(args: Namespace) -> Iterator[str]:
    if args.hybrid_context_parallel:
        yield (
            "--hybrid-context-parallel: its groups change with every batch: use "
            "--context-parallel-size"
        )
    size = args.context_parallel_size
    if size == 1:
        return
    if size < 1:
        yield f"--context-parallel-size {size}: use 1 or more"
        return
    if args.hierarchical_context_parallel_sizes:
        yield (
            "--hierarchical-context-parallel-sizes belongs to --cp-comm-type a2a+p2p, which is not "
            "supported: drop it"
        )
    if args.seq_length and args.seq_length % (2 * size):
        yield (
            f"--seq-length {args.seq_length} is not divisible by 2 * --context-parallel-size "
            f"{size}: each rank takes two chunks of the sequence"
        )
    yield from _comm_type(args)


def _comm_type(args: Namespace) -> Iterator[str]:
    kinds, layers = args.cp_comm_type, args.num_layers
    for kind in dict.fromkeys(kinds):
        if kind not in COMM_TYPES:
            yield (
                f"--cp-comm-type {kind}: a gate needs the log-sum-exp over all keys at once: "
                f"use {' or '.join(COMM_TYPES)}"
            )
    if layers and len(kinds) not in (1, layers):
        yield f"--cp-comm-type has {len(kinds)} values for {layers} layers: give 1 or {layers}"
    if "all_gather" in kinds and args.prefix_lm_tokens:
        yield (
            "--prefix-lm-tokens with --cp-comm-type all_gather: the prefix may extend beyond a "
            "rank's chunks: use --cp-comm-type a2a"
        )
    if "a2a" not in kinds or not (heads := args.num_attention_heads):
        return
    # Heads and key/value groups are divided among the ranks.
    size, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    counts = {"--num-attention-heads": heads}
    if args.group_query_attention:
        # With fewer groups than tensor-parallel ranks, each rank has a copy of one group.
        counts["--num-query-groups"] = max(args.num_query_groups or heads, tensor)
    for flag, count in counts.items():
        if count % (tensor * size):
            yield (
                f"--cp-comm-type a2a: {flag} {count} is not divisible by "
                f"--tensor-model-parallel-size {tensor} * --context-parallel-size {size}: use "
                "--cp-comm-type all_gather"
            )
