"""Checks of the layers around attention."""

from argparse import Namespace
from typing import get_args

from megasink.config import FFNActivation
from megasink.flags import flag_of

GATED_UNITS = ("reglu", "geglu", "swiglu")
# Megatron's flags that choose the activation of the FFN.
_ACTIVATIONS = ("swiglu", "squared_relu", "quick_geglu", "openai_gelu", "onnx_safe")
# TransformerEngine's FFN: its gelu is the tanh approximation, and its norms cannot be removed.
_FUSED_FFN = ("use_te_activation_func", "use_transformer_engine_op_fuser")


def problems(args: Namespace) -> list[str]:
    """Return one message per problem."""
    return [*_residual(args), *_activation(args), *_multi_head_addition(args)]


def set_gated_unit(args: Namespace) -> None:
    """Set --swiglu for a gated unit: Megatron's default FFN size and FLOPs depend on it."""
    args.swiglu = args.swiglu or args.ffn_activation in GATED_UNITS


def _residual(args: Namespace) -> list[str]:
    found = []
    clip = args.residual_clip
    if clip is not None and clip <= 0:
        found.append(f"--residual-clip {clip}: give a positive limit, or drop the flag")
    if args.sandwich_norm and args.post_norm:
        found.append("--sandwich-norm and --post-norm: choose one")
    if args.sandwich_norm and clip is not None:
        found.append("--sandwich-norm and --residual-clip: choose one, their order is not defined")
    half = args.bf16 or args.fp16
    if args.fp32_residual_connection and args.transformer_impl == "local" and half:
        found.append(
            "--fp32-residual-connection with --transformer-impl local in half precision: torch's "
            "norms would hand float32 to half-precision weights; drop one"
        )
    if args.post_norm:
        if args.fp32_residual_connection:
            found.append(
                "--post-norm with --fp32-residual-connection: the norm after the addition would "
                "feed float32 to the next layer; drop one"
            )
        if args.use_transformer_engine_op_fuser:
            found.append(
                "--post-norm with --use-transformer-engine-op-fuser: its FFN holds a norm that "
                "cannot be taken out; drop one"
            )
    return found


def _activation(args: Namespace) -> list[str]:
    found: list[str] = []
    name = args.ffn_activation
    if name is None:
        return found
    if name not in get_args(FFNActivation):
        found.append(
            f"--ffn-activation {name!r} is unknown: choose {', '.join(get_args(FFNActivation))}"
        )
    found += [
        f"--ffn-activation {name} and {flag_of(attribute)}: choose one"
        for attribute in _ACTIVATIONS
        if getattr(args, attribute, False) and name != attribute
    ]
    found += [
        f"--ffn-activation {name} with {flag_of(attribute)}: TransformerEngine's own activations "
        "are others (its gelu is an approximation); drop one"
        for attribute in _FUSED_FFN
        if getattr(args, attribute, False)
    ]
    return found


def _multi_head_addition(args: Namespace) -> list[str]:
    if args.multi_head_addition and args.delay_wgrad_compute:
        return [
            "--multi-head-addition with --delay-wgrad-compute: the projection of the sum computes "
            "its gradient at once; drop one"
        ]
    return []
