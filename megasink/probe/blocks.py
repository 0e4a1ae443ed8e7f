"""Find the parts of a transformers decoder to read, by module name and never by model.

Shapes: B rows, T tokens, H query heads, D head dim, E hidden size, X 1 or D.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megasink.errors import UserError

_LAYERS = ("layers", "h", "blocks")
_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_OUTPUT = ("o_proj", "c_proj", "dense", "out_proj")
_MLP = ("mlp", "feed_forward", "block_sparse_moe")
# The input of these modules is the state between attention and MLP. In blocks that have one,
# post_attention_layernorm normalizes the attention output.
_MIDDLE = ("pre_feedforward_layernorm", "pre_mlp_layernorm", "ln_2", "ffn_norm")
# In these classes the gate logits are rows of q_proj, by head [q | gate].
_GATED_QUERY = {"Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"}

Reader = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Block:
    """One decoder layer.

    Attributes:
        module: the layer.
        attention, output: softmax attention and its output projection; None in a layer without.
        mlp: its MLP or experts; None if not found.
        middle: the module whose input is the state after attention; None if unknown.
        parallel: attention and MLP both read the block's input, so there is no such module.
    """

    module: torch.nn.Module
    attention: torch.nn.Module | None
    output: torch.nn.Module | None
    mlp: torch.nn.Module | None
    middle: torch.nn.Module | None
    parallel: bool


def find_blocks(model: torch.nn.Module) -> list[Block]:
    """Return the decoder layers of a model, in order.

    Raises:
        UserError: no layer list, or no output projection of an attention, is found.
    """
    config: Any = model.config
    count = config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        is_list = isinstance(module, torch.nn.ModuleList) and name.split(".")[-1] in _LAYERS
        if is_list and len(module) == count:
            return [_block(layer, f"{name}.{i}") for i, layer in enumerate(module.children())]
    raise UserError(
        f"{type(model).__name__} has no list of {count} decoder layers that megasink can find: it "
        f"looks for {', '.join(_LAYERS)}, and for decoders alone"
    )


def blocks_with_attention(model: torch.nn.Module) -> list[Block]:
    """Return the decoder layers of a model, some of which have attention.

    Raises:
        UserError: none has, or as `find_blocks`.
    """
    blocks = find_blocks(model)
    if all(block.attention is None for block in blocks):
        raise UserError(
            f"{type(model).__name__} has no attention in its {len(blocks)} layers that megasink "
            f"can find: it looks for {', '.join(_ATTENTION)}"
        )
    return blocks


def _block(layer: torch.nn.Module, name: str) -> Block:
    attention = child(layer, _ATTENTION)
    output = None
    if attention is not None:
        output = child(attention, _OUTPUT)
        if output is None:
            raise UserError(
                f"{name} ({type(attention).__name__}) has no output projection named "
                f"{', '.join(_OUTPUT)}: megasink cannot read the outputs of its heads"
            )
    mlp = child(layer, _MLP)
    if getattr(layer, "use_parallel_residual", False):
        return Block(layer, attention, output, mlp, None, True)
    middle = child(layer, _MIDDLE)
    if middle is None:
        # With norms on the branch outputs only, the MLP reads the state itself.
        post_norm = hasattr(layer, "post_feedforward_layernorm")
        middle = mlp if post_norm else child(layer, ("post_attention_layernorm",))
    return Block(layer, attention, output, mlp, middle, False)


def child(module: torch.nn.Module, names: tuple[str, ...]) -> torch.nn.Module | None:
    """Return the first submodule with one of these names."""
    found = (getattr(module, name, None) for name in names)
    return next((child for child in found if isinstance(child, torch.nn.Module)), None)


def output_weight(output: torch.nn.Module, heads: int) -> Tensor:
    """Return [H, D, E]: the rows of the output projection for each query head."""
    weight: Any = output.weight
    if type(output).__name__ != "Conv1D":  # GPT-2 keeps [in, out]
        weight = weight.t()
    by_head: Tensor = weight.detach().unflatten(0, (heads, -1))
    return by_head


def gate_reader(attention: torch.nn.Module) -> tuple[torch.nn.Module, Reader] | None:
    """Return the module that computes the explicit gate's logits, and a reader of its scores.

    The reader maps the module's output [B, T, ...] and the number of heads to scores [B, T, H, X].

    Returns:
        None for attention without a known gate.
    """
    projection = getattr(attention, "g_proj", None)
    if isinstance(projection, torch.nn.Module):  # LFM3: one logit per head
        return projection, lambda logits_BTX, heads: logits_BTX.sigmoid().unflatten(-1, (heads, -1))
    gate: Any = getattr(attention, "gate", None)
    if getattr(attention, "gate_position", None) == "sdpa" and gate is not None:
        # megasink's modeling file: shared heads have one score.
        return gate.act, lambda gate_BTHX, heads: gate_BTHX.expand(-1, -1, heads, -1)
    if type(attention).__name__ in _GATED_QUERY:
        query: Any = attention.q_proj
        return (
            query,
            lambda rows_BTX, heads: rows_BTX.unflatten(-1, (heads, -1)).chunk(2, -1)[1].sigmoid(),
        )
    return None
