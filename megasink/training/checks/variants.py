"""Checks against the record of the attention variant."""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import fields

from megasink.attention.variants import Variant, foreign_options, variant, variants
from megasink.config import MODEL_OPTIONS
from megasink.flags import flag_of
from megasink.training.checks.gates import with_shape

_DEFAULTS = {field.name: field.default for kind in MODEL_OPTIONS for field in fields(kind)}


def problems(args: Namespace) -> Iterator[str]:
    """Yield one message per problem. The variant must be registered."""
    record = variant(args.attention_variant)
    flag = f"--attention-variant {record.name}"
    # One message per set of variants that have the options.
    groups: dict[str, list[str]] = {}
    for name in sorted(foreign_options(record), key=list(_DEFAULTS).index):
        if getattr(args, name) != _DEFAULTS[name]:
            owners = any_of(other for other in variants() if name in other.options)
            groups.setdefault(owners, []).append(flag_of(name))
    for owners, flags in groups.items():
        drop = "the flag" if len(flags) == 1 else "the flags"
        yield f"{', '.join(flags)}: not for {flag}: use {owners}, or drop {drop}"
    yield from _parameters(args, record)
    if args.sdpa_output_norm == "rmsnorm" and not record.norm_keeps_gate(args):
        kept = any_of(other for other in variants() if other.norm_keeps_gate(args))
        yield (
            f"--sdpa-output-norm rmsnorm with {flag}: the norm cancels the gate of its slot: "
            f"use {kept}"
        )
    if record.slot_value is None and args.head_balance_coeff:
        yield (
            f"--head-balance-coeff {args.head_balance_coeff}: the record of {flag} has no "
            "slot_value, which the gradient of the loss needs: add it, or use 0"
        )


def _parameters(args: Namespace, record: Variant) -> Iterator[str]:
    """Report parameters whose heads or groups do not divide among tensor-parallel ranks."""
    ranks = args.tensor_model_parallel_size
    heads, grouped = args.num_attention_heads, args.group_query_attention
    unsaid = not (heads and args.hidden_size and (args.num_query_groups or not grouped))
    if unsaid or ranks < 1 or heads % ranks:
        return  # reported elsewhere
    for parameter in record.parameters:
        try:
            parameter.local_shape(with_shape(args), ranks)
        except ValueError as error:
            yield (
                f"--tensor-model-parallel-size {ranks} with --attention-variant {record.name}: "
                f"{error}: use fewer ranks"
            )


def any_of(records: Iterable[Variant]) -> str:
    """Format names of variants for a "use ..." hint."""
    *others, last = [record.name for record in records]
    return f"{', '.join(others)} or {last}" if others else last
