"""Check models and options for the head-balance loss in transformers.

The last check is a forward pass: the gates that the loss reads must really gate the heads.

Shapes: B rows, T tokens, H query heads, D head dim, X 1 or D.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megasink.balance.loss import wrong_alone, wrong_together
from megasink.config import Scope
from megasink.errors import UserError
from megasink.transformers.decoder_blocks import (
    Block,
    Reader,
    check_gated,
    decoder_config,
    decoder_of,
    eager_function,
)

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
            "the same number in each layer"
        )
    needs_softmax = any(reader is None for reader in readers.values())
    implementation = decoder_config(model)._attn_implementation
    if needs_softmax and not decoder_of(model)._can_set_attn_implementation():
        problems.append(
            f"{name} bypasses transformers' attention interface, so megasink cannot read its gates"
        )
    elif needs_softmax and implementation != "megasink":
        problems.append(
            f"{name} has the attention implementation {implementation!r}, which provides no gates: "
            'import megasink.transformers and call model.set_attn_implementation("megasink")'
        )
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        problems.append(f"{name} is split over devices: the loss needs all of it on one device")
    if (getattr(model, "tp_size", None) or 1) > 1:
        problems.append(f"{name} is tensor-parallel: train with data parallelism only")
    return problems


class GateCheck:
    """Compares attention's output times its gate with the input of the output projection."""

    def __init__(
        self, gated: Mapping[int, tuple[Block, tuple[torch.nn.Module, Reader]]], heads: int
    ):
        self._heads, self._gates, self._outputs = heads, dict[int, Tensor](), dict[int, Tensor]()
        self._handles: list[Any] = []
        self._layers = {id(block.attention): layer for layer, (block, _) in gated.items()}
        implementations = set()
        for layer, (block, (module, reader)) in gated.items():
            assert block.attention is not None
            assert block.output is not None
            config: Any = block.attention.config
            implementations.add(config._attn_implementation)
            self._handles += [
                module.register_forward_hook(self._reads(layer, reader)),
                block.output.register_forward_pre_hook(self._checks(layer, block)),
            ]
        self._before = {name: ALL_ATTENTION_FUNCTIONS.get(name) for name in implementations}
        for name, function in self._before.items():
            ALL_ATTENTION_FUNCTIONS[name] = self._watched(function)

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        for name, function in self._before.items():
            del ALL_ATTENTION_FUNCTIONS[name]
            if function is not ALL_ATTENTION_FUNCTIONS.get(name):
                ALL_ATTENTION_FUNCTIONS[name] = function
        self._handles, self._before = [], {}

    def _watched(self, function: Any) -> Any:
        def attend(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = (function or eager_function(module))(module, *args, **kwargs)
            if (layer := self._layers.get(id(module))) is not None:
                self._outputs[layer] = result[0].detach()
            return result

        return attend

    def _reads(self, layer: int, reader: Reader) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Tensor) -> None:
            self._gates[layer] = reader(output.detach(), self._heads)

        return hook

    def _checks(self, layer: int, block: Block) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
            out_BTHD, gate_BTHX = self._outputs.pop(layer, None), self._gates.pop(layer, None)
            if out_BTHD is None or gate_BTHX is None:
                raise UserError(
                    f"{type(block.attention).__name__} of layer {layer} did not call its "
                    "attention and its gate before its output projection: megasink cannot "
                    "determine the gated tensor"
                )
            projected_BTHD = args[0].detach().reshape(out_BTHD.shape)
            check_gated(block.attention, projected_BTHD, out_BTHD, gate_BTHX)

        return hook
