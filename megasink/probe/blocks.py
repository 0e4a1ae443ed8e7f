"""The parts of a transformers decoder that are read: by what they are called, never by model.

Shapes: B rows, T tokens, H query heads, D head dim, E hidden size, X 1 or D.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megasink.errors import UserError

_LAYERS = ("layers", "h", "blocks")
_ATTENTION = ("self_attn", "attn", "attention")
_OUTPUT = ("o_proj", "c_proj", "dense", "out_proj")
_MLP = ("mlp", "feed_forward", "block_sparse_moe")
# Whose input is the state between attention and MLP. In blocks that have one of these,
# post_attention_layernorm normalises what attention returns.
_MIDDLE = ("pre_feedforward_layernorm", "pre_mlp_layernorm", "ln_2", "ffn_norm")
# The gate scores of these are rows of q_proj, by head [q | gate].
_GATED_QUERY = {"Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"}

Reader = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Block:
    """One decoder layer.

    Attributes:
        module: the layer.
        attention, output: its softmax attention and output projection; None in a layer without.
        mlp: its MLP or experts; None where none is found.
        middle: the module whose input is the state after attention; None where that is not known.
        parallel: attention and MLP both read the block's input, so that there is no such module.
    """

    module: torch.nn.Module
    attention: torch.nn.Module | None
    output: torch.nn.Module | None
    mlp: torch.nn.Module | None
    middle: torch.nn.Module | None
    parallel: bool


def find_blocks(model: torch.nn.Module) -> list[Block]:
    """The decoder layers of a model, in order.

    Raises:
        UserError: no list of them, or attention whose output projection is not found.
    """
    config: Any = model.config
    count = config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        is_list = isinstance(module, torch.nn.ModuleList) and name.split(".")[-1] in _LAYERS
        if is_list and len(module) == count:
            return [_block(layer, f"{name}.{i}") for i, layer in enumerate(module.children())]
    raise UserError(
        f"{type(model).__name__} has no list of {count} decoder layers that megasink can find: it "
        f"looks for {', '.join(_LAYERS)}"
    )


def _block(layer: torch.nn.Module, name: str) -> Block:
    attention = _child(layer, _ATTENTION)
    output = None
    if attention is not None:
        output = _child(attention, _OUTPUT)
        if output is None:
            raise UserError(
                f"{name} ({type(attention).__name__}) has no output projection called "
                f"{', '.join(_OUTPUT)}: megasink cannot read what its heads return"
            )
    mlp = _child(layer, _MLP)
    if getattr(layer, "use_parallel_residual", False):
        return Block(layer, attention, output, mlp, None, True)
    middle = _child(layer, _MIDDLE)
    if middle is None:
        # With norms on what the branches return, and none before, the MLP reads the state itself.
        post_norm = hasattr(layer, "post_feedforward_layernorm")
        middle = mlp if post_norm else _child(layer, ("post_attention_layernorm",))
    return Block(layer, attention, output, mlp, middle, False)


def _child(module: torch.nn.Module, names: tuple[str, ...]) -> torch.nn.Module | None:
    found = (getattr(module, name, None) for name in names)
    return next((child for child in found if isinstance(child, torch.nn.Module)), None)


def output_weight(output: torch.nn.Module, heads: int) -> Tensor:
    """[H, D, E]: the rows of the output projection that each query head's output meets."""
    weight: Any = output.weight
    if type(output).__name__ != "Conv1D":  # GPT-2 keeps [in, out]
        weight = weight.t()
    by_head: Tensor = weight.detach().unflatten(0, (heads, -1))
    return by_head


def gate_reader(attention: torch.nn.Module) -> tuple[torch.nn.Module, Reader] | None:
    """The module that makes the explicit gate's logits, and what reads scores off its output.

    The reader takes the module's output [B, T, ...] and the number of heads, and returns the scores
    [B, H, T, X].

    Returns:
        None for attention without a gate that is known.
    """
    projection = getattr(attention, "g_proj", None)
    if isinstance(projection, torch.nn.Module):
        return projection, _headwise
    gate: Any = getattr(attention, "gate", None)
    if getattr(attention, "gate_position", None) == "sdpa" and gate is not None:
        return gate.act, _scores
    if type(attention).__name__ in _GATED_QUERY:
        query: Any = attention.q_proj
        return query, _second_half
    return None


def _headwise(logits_BTX: Tensor, heads: int) -> Tensor:
    """LFM3: one logit per head."""
    return logits_BTX.sigmoid().unflatten(-1, (heads, -1)).transpose(1, 2)


def _scores(gate_BTHX: Tensor, heads: int) -> Tensor:
    """megasink's own modelling file: the scores themselves; shared heads have one."""
    return gate_BTHX.expand(-1, -1, heads, -1).transpose(1, 2)


def _second_half(logits_BTX: Tensor, heads: int) -> Tensor:
    """Qwen3-Next and Qwen3.5: of each head's 2 * D rows of q_proj the second half."""
    by_head_BTHX = logits_BTX.unflatten(-1, (heads, -1))
    return by_head_BTHX.chunk(2, -1)[1].sigmoid().transpose(1, 2)
