"""Checks of the attention variant: its record, its layers, gates, sinks, similarity and loss."""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import fields

from megasink.attention.variants import Variant, foreign_options, variant, variants
from megasink.attention.variants.gate_options import (
    changes_self_attention,
    gates_explicitly,
    is_megatrons_output_gate,
)
from megasink.attention.variants.switch_options import switch_problems
from megasink.attention.variants.variant_layers import PLAIN, layers_with_variant
from megasink.balance.loss import without_gradient, wrong_together
from megasink.config import MODEL_OPTIONS
from megasink.options.dataclass_flags import flag_of
from megasink.training.ffn_width import FFN_MULTIPLE, with_shape

_DEFAULTS = {field.name: field.default for kind in MODEL_OPTIONS for field in fields(kind)}


_LAYERS = "--attention-variant-layers"


def problems(args: Namespace) -> Iterator[str]:
    """Yield one message per problem. The variant must be registered."""
    record = variant(args.attention_variant)
    yield from of_record(args, record)
    names = ("head_balance_coeff", "head_balance_shared_heads", "head_balance_shared_refresh")
    given = {flag_of(name): getattr(args, name) for name in names}
    yield from wrong_together(given, args.num_attention_heads)
    yield from without_gradient(given, record, args.attention_similarity)
    yield from _sinks(args, record)
    if args.attention_variant_layers is not None:
        yield from _layers(args)
    if gates_explicitly(args):
        yield from _gate(args)
    yield from switch_problems(args, _groups(args), flag_of)
    if args.match_ffn_width and not args.attention_output_gate:
        yield from _width(args)
    if args.attention_similarity != "softmax":
        yield from _without_softmax(args, f"--attention-similarity {args.attention_similarity}")
    elif args.attention_normalization == "none":
        yield (
            "--attention-normalization none: the exponentials of softmax overflow if they are "
            "not divided by their sum: use row-sum, or --attention-similarity sigmoid"
        )


def of_record(args: Namespace, record: Variant) -> Iterator[str]:
    """Yield one message per flag that the record of the variant rules out."""
    flag = f"--attention-variant {record.name}"
    # One message per set of variants that have the options.
    groups: dict[str, list[str]] = {}
    for name in sorted(foreign_options(record), key=list(_DEFAULTS).index):
        if getattr(args, name) != _DEFAULTS[name]:
            owners = any_of(other for other in variants() if name in other.options)
            groups.setdefault(owners, []).append(flag_of(name))
    for owners, flags in groups.items():
        drop = "the flag" if len(flags) == 1 else "the flags"
        yield f"{flag} does not support {', '.join(flags)}: use {owners}, or drop {drop}"
    yield from _parameters(args, record)
    if args.sdpa_output_norm == "rmsnorm" and not record.norm_keeps_gate(args):
        kept = any_of(other for other in variants() if other.norm_keeps_gate(args))
        yield f"--sdpa-output-norm rmsnorm cancels the gate of {flag}: use {kept}"


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


def _sinks(args: Namespace, record: Variant) -> Iterator[str]:
    """Check fixed values and the training of sink parameters."""
    norm = args.bias_fixed_value_norm
    if args.bias_fixed_value == "none" and norm != 1.0:
        yield (
            f"--bias-fixed-value-norm {norm} without --bias-fixed-value: add --bias-fixed-value "
            "unit or uniform, or drop the flag"
        )
    for name, default in (("sink_lr_mult", 1.0), ("sink_weight_decay", 0.0)):
        flag, value = flag_of(name), getattr(args, name)
        if value != default and not record.parameters:
            with_some = any_of(other for other in variants() if other.parameters)
            yield (
                f"{flag} {value}: --attention-variant {record.name} has no sink parameters: use "
                f"{with_some}, or drop the flag"
            )
    if args.sink_lr_mult != 1.0 and args.use_mup:
        yield "--sink-lr-mult with --use-mup: muP sets these learning rates; drop one of the two"
    if args.sink_lr_mult != 1.0 and args.optimizer not in ("adam", "sgd", "muon"):
        yield f"--sink-lr-mult with --optimizer {args.optimizer} is not tested: use adam"


def _layers(args: Namespace) -> Iterator[str]:
    """Check --attention-variant-layers, in which a valid word has been replaced by its list."""
    layers = args.attention_variant_layers
    if args.num_layers:  # else reported elsewhere
        try:
            layers_with_variant(args)
        except ValueError as error:
            hint = "" if isinstance(layers, list) else " (--window-size, --window-attn-skip-freq)"
            yield f"{_LAYERS} {str(layers).replace(' ', '')}: {error}{hint}"
    if args.attention_variant == PLAIN:
        yield f"{_LAYERS} has no effect with --attention-variant {PLAIN}: drop the flag"
    shaped = args.hidden_size and args.num_attention_heads
    if shaped and "muon" in (args.optimizer or "") and is_megatrons_output_gate(with_shape(args)):
        yield (
            f"{_LAYERS} with --optimizer {args.optimizer} and elementwise gates: Muon splits every "
            "linear_qkv alike: use --gate-granularity headwise or --optimizer adam"
        )


def _gate(args: Namespace) -> Iterator[str]:
    position, ranks = args.gate_position, args.tensor_model_parallel_size
    headwise = args.gate_granularity == "headwise"
    if position == "output" and headwise:
        yield (
            "--gate-position output applies the gate after the heads are mixed, so the gate cannot "
            "be headwise: add --gate-granularity elementwise"
        )
    if position == "output" and args.gate_shared_heads:
        yield (
            "--gate-shared-heads with --gate-position output, which has no heads: drop the flag, "
            "or use --gate-position sdpa"
        )
    # Such a norm cancels a factor per head, or under LayerNorm a constant summand.
    removed = args.gate_operation == "multiply" or args.normalization == "LayerNorm"
    normed = position in ("key", "query") and (args.qk_layernorm or args.qk_l2_norm)
    if normed and removed and headwise:
        yield (
            f"--gate-position {position} with a headwise gate and --qk-layernorm: the norm cancels "
            "the gate: add --gate-granularity elementwise or drop the norm"
        )
    groups = _groups(args)
    if position in ("value", "key", "query") and groups and groups < ranks:
        yield (
            f"--gate-position {position} with {groups} key/value groups on "
            f"--tensor-model-parallel-size {ranks}: each rank has only part of a group; use at "
            f"most {groups} ranks or --gate-position sdpa"
        )


def _groups(args: Namespace) -> int | None:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def _width(args: Namespace) -> Iterator[str]:
    ranks = args.tensor_model_parallel_size
    if not changes_self_attention(args) and args.switch_heads == "none":
        yield "--match-ffn-width without a gate has nothing to match: drop the flag"
    elif FFN_MULTIPLE % ranks:
        yield (
            f"--match-ffn-width rounds to multiples of {FFN_MULTIPLE}, which are not "
            f"divisible by --tensor-model-parallel-size {ranks}: use a power of two, or give "
            "--ffn-hidden-size instead"
        )


def _without_softmax(args: Namespace, flag: str) -> Iterator[str]:
    if not variant(args.attention_variant).similarity:
        instead = any_of(record for record in variants() if record.similarity)
        yield (
            f"{flag} replaces the softmax that --attention-variant {args.attention_variant} "
            f"needs: use --attention-variant {instead}"
        )
    if args.attention_kernel.partition("+")[0] != "auto":
        yield (
            f"--attention-kernel {args.attention_kernel} computes softmax attention, not {flag}: "
            "use --attention-kernel auto"
        )
    for mask, given in (
        ("--prefix-lm-tokens", args.prefix_lm_tokens),
        ("--dataloader-inter-document-masking", args.dataloader_inter_document_masking),
        ("--attention-bias-type", args.attention_bias_type != "none"),
    ):
        if given:
            yield f"{flag} supports only causal masks and windows, not {mask}: drop one of them"
    if args.fp16:
        yield (
            f"--fp16: the sum of the weights of {flag} has no bound, and float16 overflows at "
            "65504: use --bf16"
        )
