"""Checks of context parallelism."""

from argparse import Namespace

from megasink.config import COMM_TYPES


def problems(args: Namespace) -> list[str]:
    """Return one message per problem."""
    found = []
    if args.hybrid_context_parallel:
        found.append(
            "--hybrid-context-parallel: its groups change with every batch: use "
            "--context-parallel-size"
        )
    size = args.context_parallel_size
    if size == 1:
        return found
    if size < 1:
        return [*found, f"--context-parallel-size {size}: use 1 or more"]
    if args.hierarchical_context_parallel_sizes:
        found.append(
            "--hierarchical-context-parallel-sizes belongs to --cp-comm-type a2a+p2p, which is not "
            "supported: drop it"
        )
    if args.seq_length and args.seq_length % (2 * size):
        found.append(
            f"--seq-length {args.seq_length} is not divisible by 2 * --context-parallel-size "
            f"{size}: every rank takes two chunks of the sequence"
        )
    if args.dataloader_inter_document_masking:
        found.append(
            f"--dataloader-inter-document-masking with --context-parallel-size {size}: the chunks "
            "of packed documents are others than those of a sequence, drop one of the two"
        )
    return [*found, *_comm_type(args)]


def _comm_type(args: Namespace) -> list[str]:
    kinds, layers = args.cp_comm_type, args.num_layers
    found = [
        f"--cp-comm-type {kind}: a gate needs the log-sum-exp over all keys at once: "
        f"use {' or '.join(COMM_TYPES)}"
        for kind in dict.fromkeys(kinds)
        if kind not in COMM_TYPES
    ]
    if layers and len(kinds) not in (1, layers):
        found.append(
            f"--cp-comm-type has {len(kinds)} values for {layers} layers: give one, or one for "
            "each layer"
        )
    if "all_gather" in kinds and args.prefix_lm_tokens:
        found.append(
            "--prefix-lm-tokens with --cp-comm-type all_gather: the prefix may lie beyond the "
            "chunks of a rank: use --cp-comm-type a2a"
        )
    if "a2a" in kinds and args.num_attention_heads:
        found += _shares(args)
    return found


def _shares(args: Namespace) -> list[str]:
    """Report heads or key/value groups that do not divide among the ranks."""
    size, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    heads = args.num_attention_heads
    counts = {"--num-attention-heads": heads}
    if args.group_query_attention:
        # With fewer groups than tensor-parallel ranks, each rank has a copy of one group.
        counts["--num-query-groups"] = max(args.num_query_groups or heads, tensor)
    return [
        f"--cp-comm-type a2a: {flag} {count} is not divisible by --tensor-model-parallel-size "
        f"{tensor} * --context-parallel-size {size}: use --cp-comm-type all_gather"
        for flag, count in counts.items()
        if count % (tensor * size)
    ]
