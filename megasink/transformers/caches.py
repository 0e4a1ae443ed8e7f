"""The cache of keys and values among a call's arguments, under the name that transformers gives it.

From 5.24 on that is `cache`. Before, it is `past_key_values`, and `cache` is what continuous
batching hands to kernels.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

_FIELDS = {field.name for field in fields(BaseModelOutputWithPast)}
NAMES = ("cache", "past_key_values") if "cache" in _FIELDS else ("past_key_values",)
"""What a model may be called with; from 5.24 on both, of which it takes one."""


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Return the cache that a model is called with; None if there is none."""
    caches = (arguments.get(name) for name in NAMES)
    return next((cache for cache in caches if cache is not None), None)


def without_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that neither reads nor fills a cache."""
    none = dict.fromkeys(NAMES) | {"use_cache": False}
    return {**arguments, **{name: none[name] for name in none if name in arguments}}
