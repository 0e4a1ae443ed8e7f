"""What a command line asks of attention kernels."""

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
    """A sentence for each kernel that was asked for and cannot run, or that nothing can run."""
    heads = args.num_attention_heads
    # Without a shape, which others ask for, there is no call to ask a kernel about.
    if not heads or heads < 1 or not (args.hidden_size or args.kv_channels):
        return []
    request = attention_request(args)
    if args.attention_variant not in get_args(Variant):
        request = replace(request, variant="sink")  # what else is wrong is worth knowing
    # Another similarity has a computation of its own, and its own sentence about kernels.
    softmax = args.attention_similarity == "softmax"
    try:
        choose_backend(request, args.attention_kernel if softmax else "eager")
    except ConfigError as error:
        return error.problems
    return []


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
