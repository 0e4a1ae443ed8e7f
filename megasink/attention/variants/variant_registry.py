"""The registry of attention variants: megasink's own and those registered by plugins."""

import re

from megasink.attention.variants.variant_record import Variant
from megasink.errors import UserError, unknown_name

_VARIANTS: dict[str, Variant] = {}
# The syntax of flag values; saved arguments are parsed by the same rule.
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def register(record: Variant) -> Variant:
    """Register a variant, so that --attention-variant accepts its name."""
    if not _NAME.fullmatch(record.name):
        raise UserError(
            f"attention variant {record.name!r}: use only lower-case letters, digits and hyphens "
            "in its name"
        )
    if record.name in _VARIANTS:
        raise UserError(f"attention variant {record.name!r} is registered twice: rename one")
    _VARIANTS[record.name] = record
    return record


def variant(name: str) -> Variant:
    """Return the variant with this name."""
    if not is_variant(name):
        raise UserError(unknown_name("--attention-variant", str(name), names()))
    return _VARIANTS[name]


def variants() -> tuple[Variant, ...]:
    """Return all variants in registration order."""
    return tuple(_VARIANTS.values())


def is_variant(name: object) -> bool:
    """Return whether a variant with this name is registered."""
    return isinstance(name, str) and name in _VARIANTS


def names() -> list[str]:
    """Return the values that --attention-variant accepts."""
    return list(_VARIANTS)


def of_kind(kind: str) -> Variant:
    """Return the variant with this kind (`Variant.kinds`) in conversion targets."""
    for record in variants():
        if kind in record.kinds:
            return record
    kinds = [kind for record in variants() for kind in record.kinds]
    raise UserError(unknown_name("attention", str(kind), kinds))


def parameter_names() -> tuple[str, ...]:
    """Return the names in core attention of the parameters of all variants."""
    return tuple(dict.fromkeys(p.name for record in variants() for p in record.parameters))


def foreign_options(record: Variant) -> set[str]:
    """Return the options that belong only to other variants."""
    return {option for other in variants() for option in other.options} - record.options
