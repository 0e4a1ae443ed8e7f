"""Find the cache of keys and values among a call's arguments, under transformers' name for it.

From 5.24 on the name is `cache`. Before, it is `past_key_values`, and `cache` is the object that
continuous batching hands to kernels.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

_FIELDS = {field.name for field in fields(BaseModelOutputWithPast)}
NAMES = ("cache", "past_key_values") if "cache" in _FIELDS else ("past_key_values",)
"""Names of a model's cache argument; transformers 5.24 and later accept either."""


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Return the cache in a model's arguments; None without one."""
    caches = (arguments.get(name) for name in NAMES)
    return next((cache for cache in caches if cache is not None), None)


def without_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that neither reads nor fills a cache."""
    none = dict.fromkeys(NAMES) | {"use_cache": False}
    return {**arguments, **{name: none[name] for name in none if name in arguments}}
