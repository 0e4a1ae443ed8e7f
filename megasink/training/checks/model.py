"""Checks of the model: its shape, the layer around attention, multi-token prediction."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.attention.variants import Variant, variants
from megasink.options.flags import flag_of
from megasink.options.megatron_flags import having


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
    positions, length = args.max_position_embeddings, args.seq_length
    if positions and length and length > positions:
        yield (
            f"--seq-length {length} is longer than --max-position-embeddings {positions}: lower "
            "the first or raise the second"
        )
    yield from _layer(args)
    if args.mtp_num_layers:
        yield from _prediction(args)


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
