"""Checks against the record of the attention variant."""

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import fields

from megasink.command_line import unknown_name
from megasink.config import MODEL_OPTIONS, AttentionOptions
from megasink.plugins import advice
from megasink.train.checks.gates import with_shape
from megasink.variants import (
    Variant,
    foreign_options,
    is_variant,
    names,
    variant,
    variants,
)

_DEFAULTS = {field.name: field.default for kind in MODEL_OPTIONS for field in fields(kind)}


def unknown(args: Namespace) -> list[str]:
    """Return the message for a variant that is not registered."""
    if is_variant(args.attention_variant):
        return []
    said = unknown_name("--attention-variant", args.attention_variant, names())
    return [f"{said}; {advice()}"]


def with_known_variant(args: Namespace) -> Namespace:
    """Replace an unknown variant with the default, so that the other checks can run."""
    if is_variant(args.attention_variant):
        return args
    return Namespace(**vars(args) | {"attention_variant": AttentionOptions.attention_variant})


def problems(args: Namespace) -> list[str]:
    """Return one message per problem. The variant must be registered."""
    record = variant(args.attention_variant)
    found = [*_options(args, record), *_parameters(args, record)]
    if args.sdpa_output_norm == "rmsnorm" and not record.norm_keeps_gate(args):
        kept = any_of(other for other in variants() if other.norm_keeps_gate(args))
        found.append(
            f"--sdpa-output-norm rmsnorm with --attention-variant {record.name}: the norm divides "
            f"the gate of its slot out again: use {kept}"
        )
    if record.slot_value is None and args.head_balance_coeff:
        found.append(
            f"--head-balance-coeff {args.head_balance_coeff}: the record of --attention-variant "
            f"{record.name} has no slot_value, which the gradient of the loss is measured against: "
            "state it, or set 0"
        )
    if record.slot_logit is None and args.analyze_interval:
        found.append(
            f"--analyze-interval {args.analyze_interval}: the record of --attention-variant "
            f"{record.name} has no slot_logit, without which the weights of its heads are unknown: "
            "state it, or set 0"
        )
    return found


def _options(args: Namespace, record: Variant) -> list[str]:
    """Report options of other variants, one message per set of variants."""
    groups: dict[str, list[str]] = {}
    for name in sorted(foreign_options(record), key=list(_DEFAULTS).index):
        if getattr(args, name) != _DEFAULTS[name]:
            owners = any_of(other for other in variants() if name in other.options)
            groups.setdefault(owners, []).append(f"--{name.replace('_', '-')}")
    return [
        f"{', '.join(flags)}: not for --attention-variant {record.name}: use {owners}, or drop "
        f"{'the flag' if len(flags) == 1 else 'the flags'}"
        for owners, flags in groups.items()
    ]


def _parameters(args: Namespace, record: Variant) -> list[str]:
    """Report parameters whose heads or groups do not divide among tensor-parallel ranks."""
    ranks = args.tensor_model_parallel_size
    heads, grouped = args.num_attention_heads, args.group_query_attention
    unsaid = not (heads and args.hidden_size and (args.num_query_groups or not grouped))
    if unsaid or ranks < 1 or heads % ranks:
        return []  # reported elsewhere
    found = []
    for parameter in record.parameters:
        try:
            parameter.local_shape(with_shape(args), ranks)
        except ValueError as error:
            found.append(
                f"--tensor-model-parallel-size {ranks} with --attention-variant {record.name}: "
                f"{error}: use fewer ranks"
            )
    return found


def any_of(records: Iterable[Variant]) -> str:
    """Format names of variants for a "use ..." hint."""
    *others, last = [record.name for record in records]
    return f"{', '.join(others)} or {last}" if others else last
