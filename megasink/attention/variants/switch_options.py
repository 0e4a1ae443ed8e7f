"""Interpret the options of switch heads (P1.39). Pure Python, no torch.

`options`: as in :mod:`megasink.attention.variants.gate_options`, with the fields of SwitchOptions.
"""

from collections.abc import Callable, Iterator
from typing import Any

from megasink.attention.variants.gate_options import gates_explicitly


def switch_rows(options: Any) -> int:
    """Return the rows of a group's further experts and of its router at the end of linear_qkv."""
    if options.switch_heads == "none":
        return 0
    maps = 2 if options.switch_heads == "key-value" else 1
    return (options.switch_experts - 1) * maps * options.kv_channels + options.switch_experts


def switch_problems(options: Any, groups: int | None, named: Callable[[str], str]) -> Iterator[str]:
    """Yield one sentence for each conflict; `named` returns the caller's name of an option.

    `options` also has Megatron's ``tensor_model_parallel_size``. `groups` is None if another check
    reports it.
    """
    switch = f"{named('switch_heads')} {options.switch_heads}"
    experts, top_k = options.switch_experts, options.switch_top_k
    if options.switch_heads == "none":
        for name, value in (("switch_experts", experts), ("switch_top_k", top_k)):
            if value != 1:
                yield f"{named(name)} {value} has no effect with {switch}: use value or key-value"
        return
    if experts < 1:
        yield f"{named('switch_experts')} {experts}: use at least 1"
    elif not 1 <= top_k <= experts:
        yield f"{named('switch_top_k')} {top_k} of {experts} experts: use 1 to {experts}"
    if gates_explicitly(options):
        variant = f"{named('attention_variant')} {options.attention_variant}"
        yield f"{switch} and {variant} cannot be combined: choose either experts or gates"
    ranks = options.tensor_model_parallel_size
    if groups and groups < ranks:
        yield (
            f"{switch} with {groups} key/value groups on {named('tensor_model_parallel_size')} "
            f"{ranks}: each rank has only part of a group; use at most {groups} ranks"
        )
