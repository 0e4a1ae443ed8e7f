"""Which layers of a model have its attention variant (--attention-variant-layers).

The other layers have plain softmax attention. Pure Python, no torch. `options` is any object with
AttentionOptions and Megatron's ``num_layers``, ``window_size`` and ``window_attn_skip_freq``.
"""

import ast
import copy
from typing import Any

PLAIN = "vanilla"
"""The variant of the layers that do not have the chosen variant."""
# Whether layers that a word names have a sliding window.
_WINDOWED = {"windowed": True, "full": False}
_MOST_LAYERS = 10_000


def layer_pattern(text: str) -> str | list[int]:
    """Return "windowed", "full" or a list of 1 for each layer with the variant and 0 for others.

    Expressions are lists of 0 and 1 with + and *, as in Megatron's ``--window-attn-skip-freq``.
    """
    if text in _WINDOWED:
        return text
    try:
        pattern = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, ValueError) as error:
        raise ValueError(text) from error
    if not isinstance(pattern, list):
        raise ValueError(text)
    return pattern


def _value(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        entries = [_value(entry) for entry in node.elts]
        if all(entry in (0, 1) for entry in entries):
            return [int(entry == 1) for entry in entries]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(left, int):
            left, right = right, left
        if isinstance(left, list) and isinstance(right, list) and isinstance(node.op, ast.Add):
            return left + right
        if isinstance(left, list) and isinstance(right, int) and isinstance(node.op, ast.Mult):
            if len(left) * right > _MOST_LAYERS:
                raise ValueError(ast.unparse(node))
            return left * right
    raise ValueError(ast.unparse(node))


def windowed_layers(options: Any) -> tuple[bool, ...]:
    """Return whether each layer has a sliding window, as Megatron's is_layer_window_attention."""
    layers, window = options.num_layers, options.window_size
    skip = options.window_attn_skip_freq
    if not window or window[0] < 0:
        return (False,) * layers
    if skip is None:
        return (True,) * layers
    if isinstance(skip, int):
        return tuple((layer + 1) % skip != 0 for layer in range(layers))
    if len(skip) != layers:
        raise ValueError(f"window_attn_skip_freq has {len(skip)} entries for {layers} layers")
    return tuple(bool(entry) for entry in skip)


def layers_with_variant(options: Any) -> tuple[bool, ...]:
    """Return whether each layer has the attention variant."""
    pattern, layers = options.attention_variant_layers, options.num_layers
    if pattern is None:
        return (True,) * layers
    if isinstance(pattern, str):
        has_variant = tuple(has == _WINDOWED[pattern] for has in windowed_layers(options))
    else:
        has_variant = tuple(bool(entry) for entry in pattern)
    if len(has_variant) != layers:
        raise ValueError(f"{len(has_variant)} entries for {layers} layers")
    if len(set(has_variant)) < 2:
        raise ValueError(f"{'all layers are' if all(has_variant) else 'no layer is'} chosen")
    return has_variant


def without_variant[Options](options: Options) -> Options:
    """Return a copy of the options for a layer without the variant."""
    plain: Any = copy.copy(options)
    plain.attention_variant, plain.attention_variant_layers = PLAIN, None
    return plain
