"""Checks of fixed values, sink parameters and similarity kernels."""

from argparse import Namespace
from typing import get_args

from megasink.config import FixedValue, Normalization, Similarity
from megasink.train.checks.variants import any_of
from megasink.variants import variant, variants


def problems(args: Namespace) -> list[str]:
    """Return one message per problem."""
    return [*_biases(args), *_sinks(args), *_similarity(args)]


def _biases(args: Namespace) -> list[str]:
    found = []
    kind, norm = args.bias_fixed_value, args.bias_fixed_value_norm
    if kind not in get_args(FixedValue):
        found.append(
            f"--bias-fixed-value {kind!r} is unknown: choose {', '.join(get_args(FixedValue))}"
        )
    if kind == "none" and norm != 1.0:
        found.append(
            f"--bias-fixed-value-norm {norm} without a value: add --bias-fixed-value unit or "
            "uniform, or drop the flag"
        )
    if norm <= 0:
        found.append(f"--bias-fixed-value-norm {norm}: use more than 0")
    return found


def _sinks(args: Namespace) -> list[str]:
    found = []
    record = variant(args.attention_variant)
    for name, default in (("sink_lr_mult", 1.0), ("sink_weight_decay", 0.0)):
        flag, value = "--" + name.replace("_", "-"), getattr(args, name)
        if value < 0:
            found.append(f"{flag} {value} is negative: use 0 or more")
        elif value != default and not record.parameters:
            with_some = any_of(other for other in variants() if other.parameters)
            found.append(
                f"{flag} {value}: --attention-variant {record.name} has no sink parameters: use "
                f"{with_some}, or drop the flag"
            )
    if args.sink_lr_mult != 1.0 and getattr(args, "use_mup", False):
        found.append("--sink-lr-mult with --use-mup: muP sets these learning rates: drop one")
    if args.sink_lr_mult != 1.0 and args.optimizer not in ("adam", "sgd"):
        found.append(f"--sink-lr-mult with --optimizer {args.optimizer}: not tested: use adam")
    return found


def _similarity(args: Namespace) -> list[str]:
    found = []
    similarity, normalization = args.attention_similarity, args.attention_normalization
    alpha = args.attention_scale_alpha
    for flag, value, known in (
        ("--attention-similarity", similarity, get_args(Similarity)),
        ("--attention-normalization", normalization, get_args(Normalization)),
    ):
        if value not in known:
            found.append(f"{flag} {value!r} is unknown: choose {', '.join(known)}")
    if alpha <= 0:
        found.append(f"--attention-scale-alpha {alpha}: use more than 0")
    if similarity == "softmax":
        if normalization == "none":
            found.append(
                "--attention-normalization none: the exponentials of softmax overflow without "
                "their sum: use --attention-similarity sigmoid or elu-plus-one, or row-sum"
            )
        return found
    if not variant(args.attention_variant).similarity:
        instead = any_of(record for record in variants() if record.similarity)
        found.append(
            f"--attention-similarity {similarity} has no softmax for --attention-variant "
            f"{args.attention_variant} to add to: use --attention-variant {instead}"
        )
    if args.head_balance_coeff:
        found.append(
            f"--attention-similarity {similarity} has no gate with a gradient (head importance is "
            "a proxy, P2.37): set --head-balance-coeff 0"
        )
    if args.attention_kernel.partition("+")[0] != "auto":
        found.append(
            f"--attention-kernel {args.attention_kernel} computes softmax attention, not "
            f"--attention-similarity {similarity}: use --attention-kernel auto"
        )
    masks = {
        "--prefix-lm-tokens": args.prefix_lm_tokens,
        "--dataloader-inter-document-masking": args.dataloader_inter_document_masking,
        "--attention-bias-type": args.attention_bias_type != "none",
    }
    found += [
        f"--attention-similarity {similarity} with {flag}: only causal masks and windows are "
        "computed for it, drop one of the two"
        for flag, given in masks.items()
        if given
    ]
    if args.fp16:
        found.append(
            f"--fp16: the weights of --attention-similarity {similarity} are not bounded by their "
            "sum and float16 overflows at 65504: use --bf16"
        )
    return found
