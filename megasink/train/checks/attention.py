"""What a command line gets wrong about attention."""

from argparse import Namespace
from dataclasses import replace
from typing import get_args

import torch

from megasink import platform
from megasink.attention import AttentionRequest, choose_backend
from megasink.config import Variant, visible_tokens
from megasink.errors import ConfigError
from megasink.gate_options import counts_heads

# What a kernel is asked for: a key bias is a sink to it, a value bias or a gate comes after it.
_KERNEL_VARIANT = {"gated": "vanilla", "k-bias": "sink", "kv-bias": "sink", "v-bias": "vanilla"}
_GATED = ("sink", "k-bias", "kv-bias")  # slots whose gradient needs the kernel's LSE exact


def problems(args: Namespace) -> list[str]:
    """A sentence for each."""
    found = []
    if args.train_iters is not None and args.train_iters < 1:
        found.append(f"--train-iters {args.train_iters}: train at least one step")
    window = args.window_size
    if window is not None and (len(window) != 2 or window[1] != 0):
        found.append(
            f"--window-size {','.join(map(str, window))}: give LEFT,0, the tokens before the token "
            "itself and none after it"
        )
    variant = args.attention_variant
    if variant not in get_args(Variant):
        found.append(
            f"--attention-variant {variant!r} is unknown: choose {', '.join(get_args(Variant))}"
        )
    if getattr(args, "softmax_type", "vanilla") != "vanilla":
        found.append(
            f"--softmax-type {args.softmax_type}: say it with --attention-variant "
            "(sink is Megatron's 'learnable')"
        )
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    if backend != "auto":
        found.append(
            f"--attention-backend {backend} chooses among Megatron's kernels, which drop the "
            "sink's or the gate's gradient: use --attention-kernel"
        )
    heads, tensor_parallel = args.num_attention_heads, args.tensor_model_parallel_size
    if heads and heads % tensor_parallel:
        found.append(
            f"--num-attention-heads {heads} is not divisible by "
            f"--tensor-model-parallel-size {tensor_parallel}"
        )
    if heads and args.hidden_size and not args.kv_channels and args.hidden_size % heads:
        found.append(
            f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads {heads}: "
            "change one, or give --kv-channels"
        )
    if args.fp16 and args.bf16:
        found.append("--fp16 and --bf16: choose one")
    if heads and args.hidden_size:
        request = attention_request(args)
        if variant not in get_args(Variant):
            request = replace(request, variant="sink")  # what else is wrong is worth knowing
        # Another similarity has a computation of its own, and its own sentence about kernels.
        softmax = args.attention_similarity == "softmax"
        try:
            choose_backend(request, args.attention_kernel if softmax else "eager")
        except ConfigError as error:
            found += error.problems
    return found


def attention_request(args: Namespace) -> AttentionRequest:
    """The attention call that the model of these arguments makes."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    return AttentionRequest(
        device_type="cpu" if platform.is_active() else "cuda",
        dtype=dtype,
        head_dim=args.kv_channels or args.hidden_size // args.num_attention_heads,
        variant=_KERNEL_VARIANT.get(args.attention_variant, args.attention_variant),
        window=visible_tokens(args.window_size),
        distance_bias=args.attention_bias_type != "none",
        needs_gate_gradient=args.attention_variant in _GATED
        or (args.head_balance_coeff > 0 and not counts_heads(args)),
        dropout=args.attention_dropout,
    )
