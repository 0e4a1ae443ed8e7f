"""Checks of the model's shape and its attention options."""

from argparse import Namespace

from megasink.variants import Variant, variants


def problems(args: Namespace) -> list[str]:
    """Return one message per problem."""
    return [*_attention(args), *_shape(args), *_precision(args)]


def _attention(args: Namespace) -> list[str]:
    found = []
    window = args.window_size
    if window is not None and (len(window) != 2 or window[1] != 0):
        found.append(
            f"--window-size {','.join(map(str, window))}: give LEFT,0, the tokens before the token "
            "itself and none after it"
        )
    kind = getattr(args, "softmax_type", Variant.softmax_type)
    if kind != Variant.softmax_type:
        meant = " or ".join(record.name for record in variants() if record.softmax_type == kind)
        found.append(f"--softmax-type {kind}: say it with --attention-variant {meant}")
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    if backend != "auto":
        found.append(
            f"--attention-backend {backend} chooses among Megatron's kernels, which drop the "
            "sink's or the gate's gradient: use --attention-kernel"
        )
    return found


def _shape(args: Namespace) -> list[str]:
    found = []
    heads, tensor_parallel = args.num_attention_heads, args.tensor_model_parallel_size
    if heads and tensor_parallel > 0 and heads % tensor_parallel:
        found.append(
            f"--num-attention-heads {heads} is not divisible by "
            f"--tensor-model-parallel-size {tensor_parallel}"
        )
    if heads and args.hidden_size and not args.kv_channels and args.hidden_size % heads:
        found.append(
            f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads {heads}: "
            "change one, or give --kv-channels"
        )
    positions, length = args.max_position_embeddings, args.seq_length
    if positions and length and length > positions:
        found.append(
            f"--seq-length {length} is longer than --max-position-embeddings {positions}: raise it"
        )
    return found


def _precision(args: Namespace) -> list[str]:
    found = []
    if args.fp16 and args.bf16:
        found.append("--fp16 and --bf16: choose one")
    if args.fp16_lm_cross_entropy and not args.fp16:
        found.append("--fp16-lm-cross-entropy needs --fp16")
    if args.fp32_residual_connection and not (args.fp16 or args.bf16):
        found.append("--fp32-residual-connection needs --bf16 or --fp16")
    return found
