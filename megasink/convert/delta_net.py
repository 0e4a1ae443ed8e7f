"""The sizes of gated delta-net."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """The sizes, by their names in Megatron and transformers; the defaults are those of both."""

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "DeltaNet":
        """Read the sizes from a run's arguments or a config.json."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: given[name] for name in names if given.get(name) is not None})

    @property
    def keys(self) -> int:
        """Width of all keys, or of all queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.linear_num_value_heads * self.linear_value_head_dim
