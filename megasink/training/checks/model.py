"""Checks of the model's shape, precision and attention options."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.attention.variants import Variant, variants


def problems(args: Namespace) -> Iterator[str]:
    window = args.window_size
    if window is not None and (len(window) != 2 or window[1] != 0):
        yield (
            f"--window-size {','.join(map(str, window))}: give LEFT,0, for LEFT tokens before each "
            "token and none after it"
        )
    if (kind := args.softmax_type) != Variant.softmax_type:
        meant = " or ".join(record.name for record in variants() if record.softmax_type == kind)
        yield f"--softmax-type {kind}: use --attention-variant {meant} instead"
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    if backend != "auto":
        yield (
            f"--attention-backend {backend} chooses among Megatron's kernels, which drop the "
            "gradient of sinks and gates: use --attention-kernel"
        )
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
    if args.fp16 and args.bf16:
        yield "--fp16 and --bf16: choose one"
