"""Attention of megasink in plain transformers: exact sinks at the speed of a flash kernel.

    import megasink.transformers
    model.set_attn_implementation("megasink")

Importing this package registers the attention function and the mask function under one name:
without its mask function, transformers makes no mask at all and attention silently becomes
bidirectional. docs/transformers.md lists supported and refused features. Needs no Megatron.

`HeadBalanceLoss` and `HeadBalanceCallback` add the head-balance loss (docs/finetuning.md). They are
imported on demand, with the figures and the Trainer that they need.
"""

import warnings
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from megasink.transformers.attention_function import megasink_attention
from megasink.transformers.attention_mask import Sequences, megasink_mask

NAME = "megasink"

AttentionInterface.register(NAME, megasink_attention)
AttentionMaskInterface.register(NAME, megasink_mask)

__all__ = [
    "NAME",
    "HeadBalanceCallback",
    "HeadBalanceLoss",
    "Sequences",
    "megasink_attention",
    "megasink_mask",
]


def __getattr__(name: str) -> Any:
    if name in ("HeadBalanceLoss", "HeadBalance"):
        from megasink.transformers.balance_loss import HeadBalanceLoss

        if name == "HeadBalance":  # the name of the class for Megatron
            warnings.warn("HeadBalance is now HeadBalanceLoss", DeprecationWarning, stacklevel=2)
        return HeadBalanceLoss
    if name == "HeadBalanceCallback":
        from megasink.transformers.trainer_callback import HeadBalanceCallback

        return HeadBalanceCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
