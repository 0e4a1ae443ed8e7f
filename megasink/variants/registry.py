"""The attention variants that there are: megasink's own, and those that other modules register."""

import re

from megasink.command_line import unknown_name
from megasink.errors import UserError
from megasink.variants.record import Variant

_VARIANTS: dict[str, Variant] = {}
# As in a flag; saved arguments are read back by the same rule.
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def register(record: Variant) -> Variant:
    """Add a variant: from now on --attention-variant takes its name.

    Raises:
        UserError: another one has its name, or the name is no word of a flag.
    """
    if not _NAME.fullmatch(record.name):
        raise UserError(
            f"attention variant {record.name!r}: a name has lower-case letters, digits and hyphens"
        )
    if record.name in _VARIANTS:
        raise UserError(f"attention variant {record.name!r} is registered already: rename one")
    _VARIANTS[record.name] = record
    return record


def variant(name: str) -> Variant:
    """The variant of a name.

    Raises:
        UserError: there is none, with the names that there are and the nearest one.
    """
    if not is_variant(name):
        raise UserError(unknown_name("--attention-variant", str(name), names()))
    return _VARIANTS[name]


def variants() -> tuple[Variant, ...]:
    """All of them, in the order in which they were registered."""
    return tuple(_VARIANTS.values())


def is_variant(name: object) -> bool:
    """Whether there is a variant of this name."""
    return isinstance(name, str) and name in _VARIANTS


def names() -> list[str]:
    """What --attention-variant takes."""
    return list(_VARIANTS)


def of_kind(kind: str) -> Variant:
    """The variant that conversion targets know by this word (`Variant.kinds`).

    Raises:
        UserError: there is none.
    """
    for record in variants():
        if kind in record.kinds:
            return record
    kinds = [kind for record in variants() for kind in record.kinds]
    raise UserError(unknown_name("attention", str(kind), kinds))


def parameter_names() -> tuple[str, ...]:
    """Names, in core attention, of the parameters of all variants."""
    return tuple(dict.fromkeys(p.name for record in variants() for p in record.parameters))


def foreign_options(record: Variant) -> set[str]:
    """Options that belong to other variants and not to this one."""
    return {option for other in variants() for option in other.options} - record.options
