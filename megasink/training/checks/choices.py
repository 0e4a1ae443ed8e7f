"""Checks of options that take a name; argparse would stop at the first unknown one."""

from argparse import Namespace
from dataclasses import fields

from megasink.attention.variants import is_variant, names
from megasink.config import AttentionOptions
from megasink.errors import unknown_name
from megasink.options.flags import flag_of
from megasink.options.run_options import OPTIONS
from megasink.plugins import advice


def without_unknown(args: Namespace) -> tuple[list[str], Namespace]:
    """Return one message per unknown name, and the arguments with defaults in place of those."""
    problems: list[str] = []
    defaults: dict[str, object] = {}
    if not is_variant(args.attention_variant):
        unknown = unknown_name("--attention-variant", args.attention_variant, names())
        problems.append(f"{unknown}; {advice()}")
        defaults["attention_variant"] = AttentionOptions.attention_variant
    for field in (field for options in OPTIONS for field in fields(options)):
        value, known = getattr(args, field.name), field.metadata.get("choices")
        if known and value != field.default and value not in known:
            problems.append(unknown_name(flag_of(field.name), value, known))
            defaults[field.name] = field.default
    return problems, Namespace(**vars(args) | defaults)
