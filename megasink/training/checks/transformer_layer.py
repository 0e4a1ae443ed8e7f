"""Checks of the transformer layer around attention: residual stream, FFN, sum of heads."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.flags import flag_of
from megasink.megatron_flags import having, refused

GATED_UNITS = ("reglu", "geglu", "swiglu")


def set_gated_unit(args: Namespace) -> None:
    """Set --swiglu for a gated unit: Megatron's default FFN size and FLOPs depend on it."""
    args.swiglu = args.swiglu or args.ffn_activation in GATED_UNITS


def problems(args: Namespace) -> Iterator[str]:
    clip = args.residual_clip
    if clip is not None and clip <= 0:
        yield f"--residual-clip {clip}: give a positive limit, or drop the flag"
    if args.sandwich_norm and args.post_norm:
        yield "--sandwich-norm and --post-norm: choose one"
    if args.sandwich_norm and clip is not None:
        yield "--sandwich-norm and --residual-clip: choose one; their order is not defined"
    if args.post_norm and args.fp32_residual_connection:
        yield (
            "--post-norm with --fp32-residual-connection: the norm after the addition would "
            "pass float32 to the next layer; drop one"
        )
    if args.post_norm and args.use_transformer_engine_op_fuser:
        yield (
            "--post-norm with --use-transformer-engine-op-fuser: the norm in its FFN cannot be "
            "removed; drop one"
        )
    if args.multi_head_addition and args.delay_wgrad_compute:
        yield (
            "--multi-head-addition with --delay-wgrad-compute: the projection of the sum computes "
            "its gradient immediately; drop one"
        )
    yield from _nanochat(args)
    if (name := args.ffn_activation) is None:
        return
    for attribute in having("activation"):
        if attribute not in ("ffn_activation", name) and getattr(args, attribute, False):
            yield f"--ffn-activation {name} and {flag_of(attribute)}: choose one"
    for flag, _, why in refused(args, "ffn_activation"):
        yield f"--ffn-activation {name} with {flag}: {why}; drop one"


def _nanochat(args: Namespace) -> Iterator[str]:
    cap = args.logit_softcap
    if cap is not None and cap <= 0:
        yield f"--logit-softcap {cap}: give a positive cap, or drop the flag"
    for attribute in ("norm_without_gain", "embedding_norm"):
        if getattr(args, attribute) and args.normalization != "RMSNorm":
            yield f"{flag_of(attribute)} needs --normalization RMSNorm"
    if args.norm_without_gain and args.use_transformer_engine_op_fuser:
        yield (
            "--norm-without-gain with --use-transformer-engine-op-fuser: the norm in its FFN "
            "has a weight; drop one"
        )
    if args.norm_without_gain and args.qk_layernorm:
        yield (
            "--norm-without-gain with --qk-layernorm, whose norms have weights: use --qk-l2-norm "
            "instead, which has none"
        )
    if args.zero_init_outputs and not args.untie_embeddings_and_output_weights:
        yield (
            "--zero-init-outputs without --untie-embeddings-and-output-weights: the output layer "
            "is the embedding, which cannot start at zero; add it"
        )
