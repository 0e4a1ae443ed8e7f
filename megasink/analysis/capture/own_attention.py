"""Let a transformers model attend by our function, around its own.

Shapes: B rows, T tokens, H query heads, D head dim.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megasink.transformers.blocks import decoder_config, decoder_of, eager_function


def attention_of(base: str, module: torch.nn.Module) -> Callable[..., Any]:
    """Return the function of an implementation by its name, which returns [B, T, H, D] first."""
    return eager_function(module) if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]


def is_replaced(name: str) -> bool:
    """Return whether a model now attends by a function of this name."""
    return name in AttentionInterface._global_mapping


@contextmanager
def replaced_attention(
    model: torch.nn.Module, name: str, function: Callable[..., Any]
) -> Iterator[None]:
    """Let a model attend by a function, under a new name, with its own mask."""
    decoder, base = decoder_of(model), decoder_config(model)._attn_implementation
    AttentionInterface.register(name, function)
    try:
        # Without a mask function of this name transformers makes no mask at all, and attention
        # silently becomes bidirectional.
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
        decoder.set_attn_implementation(name)
        yield
    finally:
        decoder.set_attn_implementation(base)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
