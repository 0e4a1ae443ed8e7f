"""Find the parts of a transformers decoder to read, by module name and never by model.

Shapes: B rows, T tokens, H query heads, D head dim, E hidden size, X 1 or D.
"""

import sys
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

Reader = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Gate:
    """An explicit gate on the output of each head, before the output projection.

    Attributes:
        projection: the module of the attention whose output has the logits: of a head, of all its
            elements, or those of a head behind its query rows.
        activation: what makes gates of the logits.
        beside_query: whether its rows are, by head, [query | gate].
    """

    projection: str = "g_proj"
    activation: str = "sigmoid"
    beside_query: bool = False


# By the attention's class. That output times gate is what is projected, a forward pass shows.
_GATES = {
    "AfmoeAttention": Gate("gate_proj"),
    "BailingHybridAttention": Gate(),
    "LagunaAttention": Gate(activation="softplus"),
    "Lfm3Attention": Gate(),
    "Qwen3NextAttention": Gate("q_proj", beside_query=True),
    "Qwen3_5Attention": Gate("q_proj", beside_query=True),
    "Qwen3_5MoeAttention": Gate("q_proj", beside_query=True),
}


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
    config = config.get_text_config()
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    for name, module in model.named_modules():
        is_list = isinstance(module, torch.nn.ModuleList) and name.split(".")[-1] in _LAYERS
        if is_list and len(module) == count:
            layers = enumerate(zip(module.children(), kinds, strict=True))
            return [_block(layer, f"{name}.{i}", kind) for i, (layer, kind) in layers]
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


def _block(layer: torch.nn.Module, name: str, kind: str) -> Block:
    # Some models call their linear attention self_attn, too.
    attention = None if kind == "linear_attention" else child(layer, _ATTENTION)
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
    children = (getattr(module, name, None) for name in names)
    return next((child for child in children if isinstance(child, torch.nn.Module)), None)


def output_weight(output: torch.nn.Module, heads: int) -> Tensor:
    """Return [H, D, E]: the rows of the output projection for each query head."""
    weight: Any = output.weight
    if type(output).__name__ != "Conv1D":  # GPT-2 keeps [in, out]
        weight = weight.t()
    by_head: Tensor = weight.detach().unflatten(0, (heads, -1))
    return by_head


def eager_function(attention: torch.nn.Module) -> Any:
    """Return the attention that a model's own file defines, which transformers calls "eager"."""
    return sys.modules[type(attention).__module__].eager_attention_forward


def gate_reader(attention: torch.nn.Module) -> tuple[torch.nn.Module, Reader] | None:
    """Return the module that computes the explicit gate's logits, and a reader of its gates.

    The reader maps the module's output [B, T, ...] and the number of heads to gates [B, T, H, X].

    Returns:
        None for attention without a gate.

    Raises:
        UserError: it has a gate that megasink does not know, or one that is no share.
    """
    name, own = type(attention).__name__, getattr(attention, "gate_position", None)
    if own is not None:  # megasink's modeling file: a gate elsewhere is not the importance
        gate: Any = getattr(attention, "gate", None)
        if own != "sdpa" or gate is None:
            return None
        # Shared heads have one score.
        return gate.act, lambda gate_BTHX, heads: gate_BTHX.expand(-1, -1, heads, -1)
    known = _GATES.get(name)
    if known is None:
        unknown = [n for n, _ in attention.named_children() if "gate" in n or n == "g_proj"]
        if unknown:
            raise UserError(
                f"{name} has a module {unknown[0]!r}, and megasink does not know whether it gates "
                f"the heads: it knows those of {', '.join(_GATES)}"
            )
        return None
    projection = getattr(attention, known.projection, None)
    if projection is None:  # turned off by its configuration
        return None
    if known.activation != "sigmoid":
        raise UserError(
            f"{name} gates its heads by {known.activation}, which may exceed 1: head importance is "
            "the mean of a share"
        )

    def read(logits_BTX: Tensor, heads: int) -> Tensor:
        by_head_BTHX = logits_BTX.unflatten(-1, (heads, -1))
        return (by_head_BTHX.chunk(2, -1)[1] if known.beside_query else by_head_BTHX).sigmoid()

    return projection, read


def check_gated(
    attention: torch.nn.Module | None,
    projected_BHTD: Tensor,
    out_BHTD: Tensor,
    gate_BHTX: Tensor | None,
) -> None:
    """Check that what enters the output projection is attention's output times its gate.

    Raises:
        UserError: it is not, within the rounding of half precision.
    """
    expected_BHTD = out_BHTD if gate_BHTX is None else out_BHTD * gate_BHTX
    if torch.equal(projected_BHTD, expected_BHTD):  # nearly always, and ten times as fast
        return
    if not torch.allclose(projected_BHTD, expected_BHTD, rtol=0.02, atol=1e-6, equal_nan=True):
        raise UserError(
            f"{type(attention).__name__} changes the outputs of its heads between attention and "
            "output projection in a way that megasink does not know (a gate or a norm): what it "
            "measures of its heads would be wrong"
        )
