"""Heads by name: LAYER.HEAD, both from 0, and checks against a model."""

from collections.abc import Iterable, Sequence

from megasink.errors import UserError


def parse_head(word: str) -> tuple[int, int]:
    """Return (layer, head) of a word such as 3.5."""
    layer, _, head = word.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise UserError(f"{word}: write a head as LAYER.HEAD, both from 0, such as 3.5")
    return int(layer), int(head)


def head_problems(chosen: Iterable[tuple[int, int]], heads: Sequence[int]) -> list[str]:
    """Return one sentence for each chosen head that a model does not have."""
    problems = []
    for layer, head in chosen:
        if layer >= len(heads):
            problems.append(f"head {layer}.{head}: the model has layers 0 to {len(heads) - 1}")
        elif not heads[layer]:
            problems.append(f"head {layer}.{head}: layer {layer} has no softmax attention")
        elif head >= heads[layer]:
            problems.append(f"head {layer}.{head}: layer {layer} has heads 0 to {heads[layer] - 1}")
    return problems
