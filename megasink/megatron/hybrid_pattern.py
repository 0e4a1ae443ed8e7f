"""Megatron's --hybrid-layer-pattern, read without importing Megatron.

One symbol per layer: ``*`` attention, ``-`` FFN, ``E`` experts, ``M`` Mamba, ``G`` gated delta net,
``+`` latent attention, ``D`` sparse latent attention. ``|`` separates pipeline stages, and ``/``
precedes the layers of multi-token prediction
(megatron/core/models/hybrid/hybrid_layer_allocation.py:Symbols).

Outside of Megatron, blocks are counted, as Hugging Face counts layers: layer i of results,
files and interventions is block i, a mixer and the FFN after it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megasink.attention.variants.variant_layers import layer_pattern

ATTENTION, LATENT, FFN, EXPERTS, MAMBA, DELTA_NET = "*", "+", "-", "E", "M", "G"
SUPPORTED = ATTENTION + LATENT + FFN + EXPERTS + MAMBA + DELTA_NET
SPARSE = "D"
RECURRENT = {MAMBA: "Mamba", DELTA_NET: "gated delta-net"}
"""Layers that carry a state from token to token."""
STAGE, PREDICTION = "|", "/"


def layers_of(pattern: str) -> str:
    """Return one symbol per layer: the pattern without the boundaries of pipeline stages."""
    return pattern.partition(PREDICTION)[0].replace(STAGE, "")


def recurrent(pattern: str) -> list[str]:
    """Return the names of the kinds of layers in a pattern that have a recurrent state."""
    return [name for symbol, name in RECURRENT.items() if symbol in layers_of(pattern)]


def heads_apart(key_heads: int | None, value_heads: int | None, tp: int, cp: int) -> str | None:
    """Return why ranks cannot share the heads of gated delta-net, or None."""
    for flag, heads in (
        ("--linear-num-key-heads", key_heads),
        ("--linear-num-value-heads", value_heads),
    ):
        if heads and tp * cp and heads % (tp * cp):
            return (
                f"{flag} {heads} is not a multiple of {tp} tensor- x {cp} context-parallel ranks, "
                "which share the heads of gated delta-net: use fewer ranks"
            )
    return None


class Block(NamedTuple):
    """The layers of a block in the pattern, from 0; None for a missing part."""

    mixer: int | None
    ffn: int | None


def blocks_of(pattern: str) -> list[Block]:
    """Return the blocks: a mixer and the FFN or experts after it, or one of them alone."""
    blocks: list[Block] = []
    for layer, symbol in enumerate(layers_of(pattern)):
        if symbol not in FFN + EXPERTS:
            blocks.append(Block(layer, None))
        elif blocks and blocks[-1].ffn is None:
            blocks[-1] = blocks[-1]._replace(ffn=layer)
        else:
            blocks.append(Block(None, layer))
    return blocks


def block_of_layer(pattern: str) -> dict[int, int]:
    """Return {layer of the pattern: its block}, both from 0."""
    found = enumerate(blocks_of(pattern))
    return {layer: number for number, block in found for layer in block if layer is not None}


def gpt_blocks(
    count: int, experts: int | None, frequency: int | list[int], *, latent: bool = False
) -> list[str]:
    """Return the layers of each block of a GPT model, as get_gpt_decoder_layer_specs decides.

    `experts` is --num-experts, `frequency` the parsed --moe-layer-freq, and `latent`
    --multi-latent-attention.
    """
    attention = LATENT if latent else ATTENTION
    if not experts:
        return [attention + FFN] * count
    if isinstance(frequency, int):
        frequency = [int(block % frequency == 0) for block in range(count)]
    return [attention + (EXPERTS if here else FFN) for here in frequency]


def count_blocks(arguments: Mapping[str, Any]) -> int:
    """Return the number of blocks of a run, whose arguments count the layers of its pattern."""
    pattern = arguments.get("hybrid_layer_pattern")
    return len(blocks_of(pattern)) if pattern else int(arguments["num_layers"])


def pattern_of(arguments: Mapping[str, Any]) -> str:
    """Return one symbol per layer of a run, also of one without --hybrid-layer-pattern."""
    if pattern := arguments.get("hybrid_layer_pattern"):
        return layers_of(pattern)
    every: Any = arguments.get("moe_layer_freq") or 1
    if isinstance(every, str):
        every = int(every) if every.isdecimal() else layer_pattern(every)
    latent = bool(arguments.get("multi_latent_attention"))
    counts = arguments["num_layers"], arguments.get("num_experts")
    return "".join(gpt_blocks(*counts, every, latent=latent))


def with_heads(pattern: str) -> dict[int, int]:
    """Return {block: layer} of the blocks that have attention."""
    layers = layers_of(pattern)
    return {
        number: block.mixer
        for number, block in enumerate(blocks_of(pattern))
        if block.mixer is not None and layers[block.mixer] in (ATTENTION, LATENT)
    }
