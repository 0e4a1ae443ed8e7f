"""Check in a forward pass that the gates read by the loss gate the heads.

Shapes: B rows, T tokens, H query heads, D head dim, X 1 or D.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megasink.errors import UserError
from megasink.transformers.blocks import Block, Reader, check_gated, eager_function


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
        """Remove the hooks."""
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
