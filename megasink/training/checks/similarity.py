"""Checks of fixed values, sink parameters and similarity kernels."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.attention.variants import variant, variants
from megasink.flags import flag_of
from megasink.training.checks.variants import any_of


def problems(args: Namespace) -> Iterator[str]:
    norm, alpha = args.bias_fixed_value_norm, args.attention_scale_alpha
    if args.bias_fixed_value == "none" and norm != 1.0:
        yield (
            f"--bias-fixed-value-norm {norm} without a value: add --bias-fixed-value unit or "
            "uniform, or drop the flag"
        )
    if norm <= 0:
        yield f"--bias-fixed-value-norm {norm}: use more than 0"
    yield from _sinks(args)
    if alpha <= 0:
        yield f"--attention-scale-alpha {alpha}: use more than 0"
    if args.attention_similarity != "softmax":
        yield from _without_softmax(args, f"--attention-similarity {args.attention_similarity}")
    elif args.attention_normalization == "none":
        yield (
            "--attention-normalization none: the exponentials of softmax overflow without "
            "their sum: use --attention-similarity sigmoid or elu-plus-one, or row-sum"
        )


def _sinks(args: Namespace) -> Iterator[str]:
    record = variant(args.attention_variant)
    for name, default in (("sink_lr_mult", 1.0), ("sink_weight_decay", 0.0)):
        flag, value = flag_of(name), getattr(args, name)
        if value < 0:
            yield f"{flag} {value} is negative: use 0 or more"
        elif value != default and not record.parameters:
            with_some = any_of(other for other in variants() if other.parameters)
            yield (
                f"{flag} {value}: --attention-variant {record.name} has no sink parameters: use "
                f"{with_some}, or drop the flag"
            )
    if args.sink_lr_mult != 1.0 and args.use_mup:
        yield "--sink-lr-mult with --use-mup: muP sets these learning rates; drop one of the two"
    if args.sink_lr_mult != 1.0 and args.optimizer not in ("adam", "sgd", "muon"):
        yield f"--sink-lr-mult with --optimizer {args.optimizer} is not tested: use adam"


def _without_softmax(args: Namespace, flag: str) -> Iterator[str]:
    if not variant(args.attention_variant).similarity:
        instead = any_of(record for record in variants() if record.similarity)
        yield (
            f"{flag} has no softmax for --attention-variant {args.attention_variant} to add to: "
            f"use --attention-variant {instead}"
        )
    if args.head_balance_coeff:
        yield (
            f"{flag} has no gate with a gradient (head importance is a proxy, P2.37): set "
            "--head-balance-coeff 0"
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
            yield f"{flag} with {mask}: it supports only causal masks and windows; drop one"
    if args.fp16:
        yield (
            f"--fp16: the weights of {flag} are not bounded by their sum, and float16 overflows at "
            "65504: use --bf16"
        )
