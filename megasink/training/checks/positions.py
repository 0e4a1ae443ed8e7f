"""Checks of masks and positions."""

from argparse import Namespace
from collections.abc import Iterator

# Values of Megatron's --position-embedding-type.
_SUPPORTED = ("learned_absolute", "rope", "yarn", "none")
_INSTEAD = {
    "relative": "needs TransformerEngine's attention: use none with --attention-bias-type t5",
    "mrope": "a text has one position per token: use rope",
}


def problems(args: Namespace) -> Iterator[str]:
    kind = args.position_embedding_type
    if kind not in _SUPPORTED:
        yield f"--position-embedding-type {kind}: {_INSTEAD[kind]}"
    if args.sinusoidal_position_embedding and kind != "learned_absolute":
        yield (
            "--sinusoidal-position-embedding needs --position-embedding-type learned_absolute, "
            f"not {kind}"
        )
    if args.sinusoidal_position_embedding and args.hidden_size and args.hidden_size % 2:
        yield (
            "--sinusoidal-position-embedding has a sine and a cosine for each pair of channels, "
            f"but --hidden-size {args.hidden_size} is odd: make it even"
        )
    heads, width = args.num_attention_heads, args.kv_channels
    if not width and heads and heads > 0 and args.hidden_size:
        width = args.hidden_size // heads
    if kind in ("rope", "yarn") and width and width % 2 and args.rotary_percent == 1:
        yield (
            f"--position-embedding-type {kind} rotates pairs of channels, but a head has {width} "
            "channels: give an even --kv-channels"
        )
    of_latent = args.multi_latent_attention and args.rope_type != "rope"
    if args.rotary_scaling_factor != 1 and kind != "yarn" and not of_latent:
        cure = "use --position-embedding-type yarn"
        if args.use_rope_scaling:
            cure = f"give --rope-scaling-factor {args.rotary_scaling_factor} instead"
        yield (
            f"--rotary-scaling-factor {args.rotary_scaling_factor} has no effect with "
            f"--position-embedding-type {kind}: {cure}"
        )
    if args.attention_bias_type != "none":
        yield from _bias(args)
    prefix, length = args.prefix_lm_tokens, args.seq_length
    if prefix and length and prefix >= length:
        yield (
            f"--prefix-lm-tokens {prefix} leaves no target in --seq-length {length}: use less than "
            f"{length}"
        )


def _bias(args: Namespace) -> Iterator[str]:
    bias, kind = args.attention_bias_type, args.position_embedding_type
    if kind != "none":
        yield (
            f"--attention-bias-type {bias} with --position-embedding-type {kind} would encode "
            "positions twice: use --position-embedding-type none, or no bias"
        )
    if bias == "alibi":
        return
    buckets, distance = args.relative_attention_num_buckets, args.relative_attention_max_distance
    if buckets < 2 or buckets % 2:
        yield f"--relative-attention-num-buckets {buckets}: use an even number, 2 or more"
    if distance <= buckets // 2:
        yield (
            f"--relative-attention-max-distance {distance} must be more than half of the "
            f"{buckets} buckets: use more than {buckets // 2}"
        )
