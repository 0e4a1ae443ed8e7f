"""Checks of attention kernels."""

from argparse import Namespace

import torch

from megasink import cpu
from megasink.attention import AttentionRequest, Choice, choose_backend, choose_gate_kernels
from megasink.attention.kernels.cuda import at_runtime
from megasink.attention.variants import variant
from megasink.attention.variants.gate_options import counts_heads
from megasink.attention.variants.variant_layers import without_variant
from megasink.config import visible_tokens
from megasink.errors import ConfigError
from megasink.training.checks import device_options


def problems(args: Namespace) -> list[str]:
    """Return messages if the requested kernel cannot run, or if no kernel can."""
    heads = args.num_attention_heads
    # Without a shape, which other checks report, there is no call to check.
    if not heads or heads < 1 or not (args.hidden_size or args.kv_channels):
        return []
    # Other similarities have their own implementation, and their own message about kernels.
    softmax = args.attention_similarity == "softmax"
    kernel = args.attention_kernel if softmax else "eager"
    if device_options.without_cuda(args) and device_options.needs_cuda(kernel):
        kernel = "auto"  # `device` reports it
    messages: list[str] = []
    for layer in _kinds_of_layers(args):
        request = attention_request(layer)
        for choose in (choose_backend, choose_gate_kernels):
            try:
                choose(request, kernel)
            except ConfigError as error:
                messages += [text for text in error.problems if text not in messages]
    return messages


def _kinds_of_layers(args: Namespace) -> list[Namespace]:
    """Return the options of a layer with the variant, and of one without it if there is one."""
    return [args] if args.attention_variant_layers is None else [args, without_variant(args)]


def attention_request(args: Namespace) -> AttentionRequest:
    """Return the attention call that a layer with the variant makes."""
    record = variant(args.attention_variant)
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    keys = args.kv_channels or args.hidden_size // args.num_attention_heads
    if args.multi_latent_attention:
        keys = args.qk_head_dim + args.qk_pos_emb_head_dim
    request = AttentionRequest(
        device_type="cpu" if cpu.is_active() else "cuda",
        dtype=dtype,
        head_dim=keys,
        value_dim=args.v_head_dim if args.multi_latent_attention else keys,
        variant="sink" if record.always_gated else "vanilla",
        window=visible_tokens(args.window_size),
        distance_bias=args.attention_bias_type != "none",
        needs_gate_gradient=record.slot_learns
        or (args.head_balance_coeff > 0 and not counts_heads(args)),
        dropout=args.attention_dropout,
        deterministic=args.deterministic_mode,
    )
    return at_runtime(request, None)


def kernel_choices(args: Namespace) -> dict[str, Choice]:
    """Return {attention variant: choice of its backend, "gates around it": of gate kernels}."""
    return {
        layer.attention_variant: choose_backend(attention_request(layer), args.attention_kernel)
        for layer in _kinds_of_layers(args)
    } | {"gates around it": choose_gate_kernels(attention_request(args), args.attention_kernel)}
