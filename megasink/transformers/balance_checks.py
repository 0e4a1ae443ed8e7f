"""Requirements of the head-balance loss in transformers on models and options."""

from collections.abc import Sequence
from typing import Any, get_args

import torch

from megasink.balance.options import wrong_alone, wrong_together
from megasink.config import Scope
from megasink.transformers.blocks import Block, decoder_config, decoder_of

MARK = "megasink_balanced"
"""Attribute of a model with a head-balance loss."""


def option_problems(coeff: float, shared: int, refresh: int, scope: str, heads: int) -> list[str]:
    """Return the problems of the options, one sentence each."""
    given = {"coeff": coeff, "shared_heads": shared, "refresh": refresh}
    problems = wrong_alone(given) + wrong_together(given, heads)
    known = get_args(Scope)
    if scope not in known:
        problems.append(f"scope {scope!r} is unknown: use {', '.join(known)}")
    return problems


def model_problems(
    model: torch.nn.Module, blocks: Sequence[Block], readers: dict[int, Any]
) -> list[str]:
    """Return the problems of the model, one sentence each."""
    name, problems = type(model).__name__, []
    if hasattr(model, MARK):
        problems.append(f"{name} already has a head-balance loss: call its remove() first")
    heads = sorted({block.heads for block in blocks if block.attention is not None})
    if len(heads) > 1:
        problems.append(
            f"{name} has layers of {' and of '.join(map(str, heads))} heads: the loss needs "
            "the same number in each"
        )
    needs_softmax = any(reader is None for reader in readers.values())
    implementation = decoder_config(model)._attn_implementation
    if needs_softmax and not decoder_of(model)._can_set_attn_implementation():
        problems.append(
            f"{name}: its attention bypasses transformers' attention interface, so it gives no "
            "gates; models written for AttentionInterface do"
        )
    elif needs_softmax and implementation != "megasink":
        problems.append(
            f"{name} has the attention implementation {implementation!r}, which gives no gates: "
            'import megasink.transformers and call model.set_attn_implementation("megasink")'
        )
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        problems.append(f"{name} is split over devices: the loss needs a whole model on each")
    if (getattr(model, "tp_size", None) or 1) > 1:
        problems.append(f"{name} is tensor-parallel: train with data parallelism only")
    return problems
