"""What a model or an option must be for the head-balance loss in transformers."""

from typing import Any, get_args

import torch

from megasink.balance.options import wrong_alone, wrong_together
from megasink.config import Scope

MARK = "megasink_balanced"
"""Attribute of a model with a head-balance loss."""


def option_problems(coeff: float, shared: int, refresh: int, scope: str, heads: int) -> list[str]:
    """Return what is wrong with the options, a sentence each."""
    given = {"coeff": coeff, "shared_heads": shared, "refresh": refresh}
    problems = wrong_alone(given) + wrong_together(given, heads)
    known = get_args(Scope)
    if scope not in known:
        problems.append(f"scope {scope!r} is unknown: use {', '.join(known)}")
    return problems


def model_problems(
    model: torch.nn.Module, attentions: dict[int, torch.nn.Module], readers: dict[int, Any]
) -> list[str]:
    """Return what is wrong with the model, a sentence each.

    Args:
        attentions: Its attention modules, by layer.
        readers: Those of their explicit gates, or None.
    """
    config: Any = model.config
    name, problems = type(model).__name__, []
    if not attentions:
        problems.append(f"{name} has no layer with softmax attention: there is nothing to balance")
    elif hasattr(model, MARK):
        problems.append(f"{name} already has a head-balance loss: call its remove() first")
    implementation = config.get_text_config()._attn_implementation
    if any(reader is None for reader in readers.values()) and implementation != "megasink":
        problems.append(
            f"{name} has the attention implementation {implementation!r}, which gives no gates: "
            'import megasink.transformers and call model.set_attn_implementation("megasink")'
        )
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        problems.append(f"{name} is split over devices: the loss needs a whole model on each")
    if (getattr(model, "tp_size", None) or 1) > 1:
        problems.append(f"{name} is tensor-parallel: train with data parallelism only")
    return problems
