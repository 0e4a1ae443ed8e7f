"""Find the parts of a transformers decoder by module name, never by model.

Shapes: B rows, T tokens, H query heads, D head dim, E hidden size, X 1 or D.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megasink.errors import UserError

_LAYERS = ("layers", "h", "blocks")
# Names of the numbers of layers and heads in configurations and attention modules. Of a decoder cut
# out of an encoder-decoder, the second name of each pair is the encoder's.
_COUNTS = ("decoder_layers", "num_hidden_layers")
_CONFIG_HEADS = ("decoder_attention_heads", "num_attention_heads")
_MODULE_HEADS = ("num_heads", "num_attention_heads")
_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
# Modules of hybrid models that are attention in some layers, where they project keys.
_MIXERS = ("mixer", "temporal_block")
_OUTPUT = ("o_proj", "c_proj", "dense", "out_proj")
_MLP = ("mlp", "feed_forward", "block_sparse_moe")
# The input of these modules is the state between attention and MLP. In blocks that have one,
# post_attention_layernorm normalizes the attention output.
_MIDDLE = ("pre_feedforward_layernorm", "pre_mlp_layernorm", "ln_2", "ffn_norm")

Reader = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Gate:
    """An explicit gate on the output of each head, before the output projection."""

    projection: str = "g_proj"  # its output has the logits: one per head, or one per element
    activation: str = "sigmoid"
    beside_query: bool = False  # the output is [query | gate] by head


# By the attention's class. A forward pass checks that output times gate is projected.
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
    """One decoder layer; without softmax attention, two parts are None and `heads` is 0."""

    module: torch.nn.Module
    attention: torch.nn.Module | None
    output: torch.nn.Module | None
    heads: int
    mlp: torch.nn.Module | None
    middle: torch.nn.Module | None  # its input is the state after attention; None if unknown
    parallel: bool  # whether attention and MLP are


def decoder_of(model: torch.nn.Module) -> Any:
    """Return the decoder in a model of several parts, such as a vision tower beside it."""
    get_decoder: Any = getattr(model, "get_decoder", lambda: model)
    decoder = get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model


def decoder_config(model: torch.nn.Module) -> Any:
    """Return the configuration of a model's decoder, which may be a part of the model's."""
    config: Any = model.config
    return config.get_text_config(decoder=True)


def find_blocks(model: torch.nn.Module) -> list[Block]:
    """Return the decoder layers of a model, in order, some of which have attention."""
    if not hasattr(model, "config"):
        raise UserError(f"{type(model).__name__} is not a model of transformers")
    config, whole = decoder_config(model), type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{whole} is an encoder-decoder: megasink supports decoders only")
    count = _first(config, _COUNTS)
    for name, module in decoder_of(model).named_modules():
        is_list = isinstance(module, torch.nn.ModuleList) and name.split(".")[-1] in _LAYERS
        if is_list and len(module) == count:
            kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
            layers = enumerate(zip(module.children(), kinds, strict=True))
            blocks = [_block(layer, f"{name}.{i}", kind, config) for i, (layer, kind) in layers]
            break
    else:
        raise UserError(
            f"megasink cannot find a list of {'' if count is None else f'{count} '}decoder layers "
            f"in {whole}: it looks for {', '.join(_LAYERS)}, in decoders only"
        )
    if all(block.attention is None for block in blocks):
        raise UserError(
            f"megasink cannot find attention in the {len(blocks)} layers of {whole}: it looks for "
            f"{', '.join((*_ATTENTION, *_MIXERS))}"
        )
    return blocks


def carries_state(model: torch.nn.Module) -> bool:
    """Return whether a layer may carry a state from token to token, also between documents.

    Delta-net, Mamba and short convolutions do: the last two inside attention layers, too.
    """
    convolves = any(isinstance(m, torch.nn.Conv1d) for m in decoder_of(model).modules())
    return convolves or any(block.attention is None for block in find_blocks(model))


def _block(layer: torch.nn.Module, name: str, kind: str, config: Any) -> Block:
    # Some models call their linear attention self_attn, too.
    attention = None if kind == "linear_attention" else child(layer, _ATTENTION)
    mixer = child(layer, _MIXERS)
    if attention is None and hasattr(mixer, "k_proj"):
        attention = mixer
    output, heads = None, 0
    if attention is not None:
        output = child(attention, _OUTPUT)
        if output is None:
            raise UserError(
                f"{name} ({type(attention).__name__}) has no output projection named "
                f"{', '.join(_OUTPUT)}: megasink cannot read the outputs of its heads"
            )
        heads = _heads(attention, name, config)
    mlp = child(layer, _MLP)
    if getattr(layer, "use_parallel_residual", False):
        return Block(layer, attention, output, heads, mlp, None, True)
    middle = child(layer, _MIDDLE)
    if middle is None:
        # With norms on the branch outputs only, the MLP reads the state itself.
        post_norm = hasattr(layer, "post_feedforward_layernorm")
        middle = mlp if post_norm else child(layer, ("post_attention_layernorm",))
    return Block(layer, attention, output, heads, mlp, middle, False)


def _heads(attention: torch.nn.Module, name: str, config: Any) -> int:
    """Return H of a layer; layers of a model may differ."""
    own = _first(attention, _MODULE_HEADS)
    if own is None:  # of the layer, if it has a configuration of its own
        own = _first(getattr(attention, "config", config), _CONFIG_HEADS)
    if own is None:
        raise UserError(
            f"neither {name} ({type(attention).__name__}) nor its configuration has the number of "
            f"heads ({', '.join(_MODULE_HEADS)})"
        )
    return own


def _first(holder: Any, names: tuple[str, ...]) -> int | None:
    """Return the first attribute with one of these names that is a number."""
    numbers = (getattr(holder, name, None) for name in names)
    return next((number for number in numbers if isinstance(number, int)), None)


def child(module: torch.nn.Module, names: tuple[str, ...]) -> torch.nn.Module | None:
    """Return the first submodule with one of these names."""
    children = (getattr(module, name, None) for name in names)
    return next((child for child in children if isinstance(child, torch.nn.Module)), None)


def output_weight(output: torch.nn.Module, heads: int) -> Tensor:
    """Return [H, D, E]: the rows of the output projection for each query head."""
    weight: Any = getattr(output, "weight", None)
    is_matrix = isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()
    if not is_matrix or weight.element_size() < 2:  # FP8 needs a scale
        raise UserError(
            f"the output projection is a {type(output).__name__} without a matrix of "
            "weights (it may be quantized): megasink cannot read it"
        )
    if type(output).__name__ != "Conv1D":  # GPT-2 keeps [in, out]
        weight = weight.t()
    by_head: Tensor = weight.detach().unflatten(0, (heads, -1))
    return by_head


def eager_function(attention: torch.nn.Module) -> Any:
    """Return the attention defined in a model's own file, which transformers calls "eager"."""
    return sys.modules[type(attention).__module__].eager_attention_forward


def gate_reader(attention: torch.nn.Module) -> tuple[torch.nn.Module, Reader] | None:
    """Return the module of the gate's logits, and (its output, H) -> gates [B, T, H, X]."""
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
                f"{name} has a module {unknown[0]!r}, which may gate the heads: megasink knows "
                f"only the gates of {', '.join(_GATES)}"
            )
        return None
    projection = getattr(attention, known.projection, None)
    if projection is None:  # turned off by its configuration
        return None
    if known.activation != "sigmoid":
        raise UserError(
            f"{name} gates its heads by {known.activation}, which may exceed 1, but head "
            "importance is a mean of gates between 0 and 1"
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
    """Check that the input of the output projection is attention's output times its gate."""
    expected_BHTD = out_BHTD if gate_BHTX is None else out_BHTD * gate_BHTX
    expected_BHTD = expected_BHTD.to(projected_BHTD.dtype)  # gates may be wider
    if torch.equal(projected_BHTD, expected_BHTD):  # nearly always, and ten times as fast
        return
    if not torch.allclose(projected_BHTD, expected_BHTD, rtol=0.02, atol=1e-6, equal_nan=True):
        raise UserError(
            f"{type(attention).__name__} changes the outputs of its heads before the output "
            "projection in an unknown way (a gate or a norm), so measurements of its heads would "
            "be wrong"
        )
