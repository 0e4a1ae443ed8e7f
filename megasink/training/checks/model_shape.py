"""Checks of the model: shape, latent attention, rest of a layer, prediction, masks, positions."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.attention.variants import Variant, is_variant, variant, variants
from megasink.attention.variants.gate_options import fits_latent
from megasink.options.dataclass_flags import flag_of
from megasink.options.megatron_flags import having

# Values of Megatron's --position-embedding-type.
_SUPPORTED = ("learned_absolute", "rope", "yarn", "none")
_INSTEAD = {
    "relative": "needs TransformerEngine's attention: use none with --attention-bias-type t5",
    "mrope": "a text has one position per token: use rope",
}
_BY_LAYER = ("moe_layer_freq", "window_attn_skip_freq", "no_rope_freq", "linear_attention_freq")
_WIDTHS = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def problems(args: Namespace) -> Iterator[str]:
    window = args.window_size
    if window is not None and (len(window) != 2 or window[1] != 0):
        yield (
            f"--window-size {','.join(map(str, window))}: use LEFT,0: LEFT tokens before each "
            "token and none after it"
        )
    if (kind := args.softmax_type) != Variant.softmax_type:
        meant = " or ".join(record.name for record in variants() if record.softmax_type == kind)
        yield f"--softmax-type {kind}: use --attention-variant {meant} instead"
    heads, tensor_parallel = args.num_attention_heads, args.tensor_model_parallel_size
    if heads and tensor_parallel > 0 and heads % tensor_parallel:
        yield (
            f"--num-attention-heads {heads} is not divisible by "
            f"--tensor-model-parallel-size {tensor_parallel}"
        )
    if heads and args.hidden_size and not args.kv_channels and args.hidden_size % heads:
        yield (
            f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads {heads}: "
            "change one, or give --kv-channels"
        )
    for name in _BY_LAYER:
        values, layers = getattr(args, name), args.num_layers
        if isinstance(values, list) and layers and len(values) != layers:
            yield f"{flag_of(name)} has {len(values)} entries, for {layers} layers: give one each"
    positions, length = args.max_position_embeddings, args.seq_length
    if positions and length and length > positions:
        yield (
            f"--seq-length {length} is longer than --max-position-embeddings {positions}: lower "
            "the first or raise the second"
        )
    yield from _positions(args)
    yield from _layer(args)
    if args.mtp_num_layers:
        yield from _prediction(args)
    if args.multi_latent_attention:
        yield from _latent(args)


def _layer(args: Namespace) -> Iterator[str]:
    """Check the residual stream and the FFN."""
    name = args.ffn_activation
    for attribute in having("activation") if name is not None else ():
        if attribute not in ("ffn_activation", name) and getattr(args, attribute, False):
            yield f"--ffn-activation {name} and {flag_of(attribute)}: choose one"
    for attribute in ("norm_without_gain", "embedding_norm"):
        if getattr(args, attribute) and args.normalization != "RMSNorm":
            yield f"{flag_of(attribute)} needs --normalization RMSNorm"
    if args.zero_init_outputs and not args.untie_embeddings_and_output_weights:
        yield (
            "--zero-init-outputs without --untie-embeddings-and-output-weights: the output layer "
            "is the embedding, which cannot start at zero: add "
            "--untie-embeddings-and-output-weights"
        )


def _prediction(args: Namespace) -> Iterator[str]:
    """Check --mtp-num-layers."""
    if (kind := args.position_embedding_type) not in ("rope", "none"):
        yield f"--mtp-num-layers with --position-embedding-type {kind}: use rope or none"
    stages = args.pipeline_model_parallel_size
    if stages > 1 and not args.untie_embeddings_and_output_weights:
        yield (
            f"--mtp-num-layers with --pipeline-model-parallel-size {stages} and one weight for "
            "embedding and output layer: Megatron cannot save this weight: add "
            "--untie-embeddings-and-output-weights"
        )


def _latent(args: Namespace) -> Iterator[str]:
    """Check latent attention (--multi-latent-attention)."""
    name = args.attention_variant
    if is_variant(name) and not fits_latent(variant(name), args):
        yield f"--attention-variant {name} has biases, which latent attention does not support"
    if (positions := args.position_embedding_type) != "rope":
        yield (
            f"--position-embedding-type {positions}: latent attention rotates a part of each head: "
            "use rope (--rope-type yarn extends the context)"
        )
    if args.yarn_correction_range_round_to_int is False:
        yield "--no-yarn-correction-range-round-to-int: latent attention always rounds: drop it"
    if args.q_lora_rank is not None and args.q_lora_rank < 1:
        yield f"--q-lora-rank {args.q_lora_rank}: give 1 or more, or drop the flag"
    for width in _WIDTHS:
        if getattr(args, width) < 1:
            yield f"--{width.replace('_', '-')} {getattr(args, width)}: give 1 or more"
    keys, values = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    if args.qk_pos_emb_head_dim % 2:
        yield f"--qk-pos-emb-head-dim {args.qk_pos_emb_head_dim} is odd: give an even number"
    if values > keys:
        yield (
            f"--v-head-dim {values} is wider than keys ({keys}, --qk-head-dim plus "
            "--qk-pos-emb-head-dim): values may only be narrower"
        )
    if args.context_parallel_size > 1 and {*args.cp_comm_type} != {"all_gather"}:
        yield (
            f"--cp-comm-type {' '.join(args.cp_comm_type)}: latent attention supports only "
            "all_gather: use --cp-comm-type all_gather"
        )
    ranks = args.tensor_model_parallel_size
    if args.transformer_impl != "local" or ranks < 2:
        return
    # Megatron's local layers share the rows of the down-projections among the ranks.
    latents = {"--q-lora-rank": args.q_lora_rank or 0}
    latents["--kv-lora-rank plus --qk-pos-emb-head-dim"] = (
        args.kv_lora_rank + args.qk_pos_emb_head_dim
    )
    for flag, rows in latents.items():
        if rows % ranks:
            yield f"{flag} ({rows}) is not divisible by --tensor-model-parallel-size {ranks}"


def _positions(args: Namespace) -> Iterator[str]:
    """Check masks and positions."""
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
