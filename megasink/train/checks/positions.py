"""Checks of masks and positions."""

from argparse import Namespace
from typing import get_args

from megasink.config import AttentionBias

# Values of Megatron's --position-embedding-type.
_SUPPORTED = ("learned_absolute", "rope", "yarn", "none")
_INSTEAD = {
    "relative": "it needs TransformerEngine's attention: use none with --attention-bias-type t5",
    "mrope": "text has one position for each token: use rope",
}


def problems(args: Namespace) -> list[str]:
    """Return one message per problem."""
    return [
        *_embedding(args),
        *_bias(args),
        *_prefix(args),
        *_documents(args),
        *_sink_token(args),
    ]


def _embedding(args: Namespace) -> list[str]:
    found = []
    kind = args.position_embedding_type
    if kind not in _SUPPORTED:
        found.append(f"--position-embedding-type {kind}: {_INSTEAD[kind]}")
    if args.sinusoidal_position_embedding:
        if kind != "learned_absolute":
            found.append(
                f"--sinusoidal-position-embedding with --position-embedding-type {kind}: it takes "
                "the place of the table of learned_absolute, give that"
            )
        if args.hidden_size and args.hidden_size % 2:
            found.append(
                f"--sinusoidal-position-embedding has a sine and a cosine for each pair of "
                f"channels: --hidden-size {args.hidden_size} is odd, make it even"
            )
    return found


def _bias(args: Namespace) -> list[str]:
    found = []
    bias, kind = args.attention_bias_type, args.position_embedding_type
    if bias not in (known := get_args(AttentionBias)):
        return [f"--attention-bias-type {bias!r} is unknown: choose {', '.join(known)}"]
    if bias == "none":
        return []
    if kind != "none":
        found.append(
            f"--attention-bias-type {bias} with --position-embedding-type {kind} would tell "
            "positions twice: give --position-embedding-type none, or no bias"
        )
    if bias == "alibi":
        return found
    buckets, distance = args.relative_attention_num_buckets, args.relative_attention_max_distance
    if buckets < 2 or buckets % 2:
        found.append(
            f"--relative-attention-num-buckets {buckets}: half of them hold one distance each, "
            "give an even number of at least 2"
        )
    if distance <= buckets // 2:
        found.append(
            f"--relative-attention-max-distance {distance} lies in the first half of "
            f"{buckets} buckets: give more than {buckets // 2}"
        )
    return found


def _prefix(args: Namespace) -> list[str]:
    prefix = args.prefix_lm_tokens
    if prefix < 0:
        return [f"--prefix-lm-tokens {prefix} is negative: use 0 for a causal model"]
    if not prefix:
        return []
    found = []
    if args.seq_length and prefix >= args.seq_length:
        found.append(
            f"--prefix-lm-tokens {prefix} leaves no target in --seq-length {args.seq_length}: "
            f"use less than {args.seq_length}"
        )
    windowed, packed = args.window_size is not None, args.dataloader_inter_document_masking
    drop = "drop one of the two"
    others = {
        f"--window-size: every token is to see the prefix, {drop}": windowed,
        f"--dataloader-inter-document-masking: a document may end in the prefix, {drop}": packed,
        "--attention-bias-type: a key ahead of a token has no distance, use another position "
        "embedding": args.attention_bias_type != "none",
    }
    return found + [f"--prefix-lm-tokens with {text}" for text, given in others.items() if given]


def _documents(args: Namespace) -> list[str]:
    kind = args.position_embedding_type
    alone = args.reset_position_ids and not args.dataloader_inter_document_masking
    if not alone or kind == "learned_absolute":
        return []
    return [
        f"--reset-position-ids changes nothing under --position-embedding-type {kind}: use "
        "--dataloader-inter-document-masking, whose documents start at position 0"
    ]


def _sink_token(args: Namespace) -> list[str]:
    if not args.sink_token:
        return []
    others = {
        "--prefix-lm-tokens": args.prefix_lm_tokens,
        "--dataloader-inter-document-masking": args.dataloader_inter_document_masking,
    }
    return [
        f"--sink-token with {flag}: it opens a sequence, not a document or its prefix, drop one of "
        "the two"
        for flag, given in others.items()
        if given
    ]
