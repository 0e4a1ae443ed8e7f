"""Attention variants, one record each; CONTRIBUTING.md shows how to add one."""

from megasink.attention.variants import builtin
from megasink.attention.variants.variant_record import (
    SINK_WEIGHT,
    ZERO_GATES,
    Export,
    Parameter,
    Variant,
    always,
    first_value,
    never,
    no_slot,
    zero_value,
)
from megasink.attention.variants.variant_registry import (
    foreign_options,
    is_variant,
    names,
    of_kind,
    parameter_names,
    register,
    variant,
    variants,
)

__all__ = ["SINK_WEIGHT", "ZERO_GATES", "Export", "Parameter", "Variant", "always", "first_value"]
__all__ += ["foreign_options", "is_variant", "names", "never", "no_slot", "of_kind"]
__all__ += ["parameter_names", "register", "variant", "variants", "zero_value"]

for _record in builtin.VARIANTS:
    register(_record)
