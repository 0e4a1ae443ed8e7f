"""Rejects models that Megatron's dynamic inference would compute incorrectly.

Dynamic inference, and static inference with --flash-decode, bypass core attention and call
flash-attn's CUDA kernels (megatron/core/transformer/attention.py:1022,757). These support two
softmax types, by ``config.softmax_type``: "learnable" (megasink's sink) and "off-by-one". All other
changes that megasink makes to attention would be silently dropped.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from megasink.attention.variants import variants
from megasink.config import HeadBalanceOptions
from megasink.errors import ConfigError
from megasink.megatron.config import MegasinkTransformerConfig
from megasink.options.run_options import OPTIONS, RunOptions

# Options that do not change a trained model, or that are checked separately.
_KNOWN = {"attention_variant", "softmax_offset_init", "attention_kernel"} | {
    option.name for kind in (HeadBalanceOptions, RunOptions) for option in dataclasses.fields(kind)
}


def dynamic_inference_problems(config: MegasinkTransformerConfig, device_type: str) -> list[str]:
    """Return why a model cannot run under Megatron's dynamic inference; empty if it can.

    Any megasink option that is not known to work there is a reason.
    """
    problems = []
    if device_type != "cuda":
        problems.append("dynamic inference needs a CUDA device for flash-attn's kernels")
    computed = [record.name for record in variants() if record.dynamic_inference]
    if config.attention_variant not in computed:
        problems.append(
            f"dynamic inference supports {', '.join(computed)} attention, "
            f"not --attention-variant {config.attention_variant}"
        )
    for option in (option for kind in OPTIONS for option in dataclasses.fields(kind)):
        value = getattr(config, option.name, option.default)
        if option.name not in _KNOWN and value != option.default:
            flag = "--" + option.name.replace("_", "-")
            problems.append(f"dynamic inference has not been tested with {flag} {value}")
    return problems


def refuse_what_bypasses_core_attention(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise if core attention would be bypassed; a forward pre-hook of a model."""
    context = kwargs.get("inference_context")
    if context is None:
        return
    config: Any = model.config
    problems = []
    if config.flash_decode:
        problems.append("--flash-decode bypasses core attention and its window: drop the flag")
    if context.is_dynamic_batching():
        device = next(model.parameters()).device.type
        problems += dynamic_inference_problems(config, device)
    if problems:
        raise ConfigError([f"{p} (use static inference: megasink generate)" for p in problems])
