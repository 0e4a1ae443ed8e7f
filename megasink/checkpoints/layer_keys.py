"""Keys of layers in torch_dist checkpoints; hybrid models' keys as GPT models' keys.

A GPTModel numbers blocks, or stacks them; a HybridModel numbers the layers of its pattern.
"""

import re
from collections.abc import Iterable

from megasink.megatron.hybrid_pattern import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    FFN,
    LATENT,
    MAMBA,
    block_of_layer,
)

LAYERS = "decoder.layers."
NUMBERED = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
"""Pattern of a layer's key: the layer's number, and the weight's name within the layer."""
HEAD_STATE = ".head_counter."
"""Substring of the head-balance loss's keys, which only megasink checkpoints have."""
LAST_NORM = ("decoder.final_norm.", "decoder.final_layernorm.")
"""Key prefixes of the final norm in a hybrid model and in a GPT model."""
# The norm before the experts: TransformerEngine's spec stores it under the first name, Megatron's
# own spec under the second, which is the name in a dense layer; an imported model has both.
NORMS = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
# The first match is the symbol of the layer that has the key; norms alone do not decide.
_SYMBOLS = {
    MAMBA: re.compile(r"mixer\."),
    DELTA_NET: re.compile(r"self_attention\.(in_proj|conv1d|A_log)"),
    LATENT: re.compile(r"self_attention\.linear_kv_"),
    ATTENTION: re.compile(r"self_attention\."),
    EXPERTS: re.compile(r"mlp\.(router|experts)\."),
    FFN: re.compile(r"mlp\."),
}


def is_stacked(keys: Iterable[str]) -> bool:
    """Return whether keys of weights or optimizer states have layers on a leading axis."""
    found = (key.partition(LAYERS)[2] for key in keys)
    return any(rest and not rest[0].isdigit() for rest in found)


def pattern_in(keys: Iterable[str]) -> str | None:
    """Return the pattern of the hybrid model with weights of these keys; None for a GPT's."""
    keys = list(keys)
    if is_stacked(keys):
        return None
    symbols: dict[int, set[str]] = {}
    for number, rest in (found.groups() for found in map(NUMBERED.match, keys) if found):
        kinds = (symbol for symbol, known in _SYMBOLS.items() if known.match(rest))
        symbols.setdefault(int(number), set()).update(next(kinds, ""))
    mixers, pattern = {MAMBA, DELTA_NET, LATENT, ATTENTION}, ""
    for layer in range(len(symbols)):
        found = symbols.get(layer, set())
        if not found or (found & mixers and found & {FFN, EXPERTS}):
            return None
        pattern += next(symbol for symbol in _SYMBOLS if symbol in found)
    return pattern or None


def as_hybrid_key(key: str) -> str:
    """Return the key in a hybrid model, whose blocks are a mixer and an FFN, of a numbered one."""
    if layer := NUMBERED.match(key):
        is_ffn = re.match(r"(pre_|post_)?mlp", layer[2]) is not None
        return f"{LAYERS}{2 * int(layer[1]) + is_ffn}.{layer[2]}"
    return key.replace(*LAST_NORM[::-1])


def as_gpt_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return {key: key in a GPT model with numbered layers}; a GPT's keys do not change."""
    keys = list(keys)
    if (pattern := pattern_in(keys)) is None:
        return {key: key for key in keys}
    block_of = block_of_layer(pattern)

    def renamed(key: str) -> str:
        if layer := NUMBERED.match(key):
            return f"{LAYERS}{block_of[int(layer[1])]}.{layer[2]}"
        return key.replace(*LAST_NORM)

    return {key: renamed(key) for key in keys}
