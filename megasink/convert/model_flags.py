"""Architecture -> the flags with which ``megasink train`` builds the model."""

import dataclasses
import re
import shlex
from collections.abc import Iterable, Sequence

from megasink.convert.architecture import Architecture, Latent, Yarn
from megasink.convert.targets.target import window_of
from megasink.errors import UserError
from megasink.options.dataclass_flags import flag_of
from megasink.training.flag_file import refused

_UNITS = {
    "silu": "--swiglu",
    "gelu": "--ffn-activation geglu",
    "relu": "--ffn-activation reglu",
    "gpt-oss": "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0",
}


def model_flags(model: Architecture) -> list[str]:
    """Return Megatron's and megasink's flags of a model, without data, optimizer and layout."""
    plain_ffn = f"--ffn-activation {model.activation}"
    if model.activation == "relu2":
        plain_ffn = "--squared-relu"
    positions = model.options.position_embedding_type
    flags = [
        *("--num-layers", model.layers),
        *("--hidden-size", model.hidden),
        *("--ffn-hidden-size", model.dense_ffn or model.ffn),
        *("--num-attention-heads", model.heads),
        *("--kv-channels", model.head_dim),
        *("--max-position-embeddings", model.positions),
        *("--padded-vocab-size", model.padded),
        *("--normalization", model.options.normalization),
        *("--norm-epsilon", model.norm_eps),
        *("--position-embedding-type", "yarn" if model.yarn and not model.latent else positions),
        *("--rotary-base", _number(model.rope_base)),
        *("--init-method-std", model.init_std),
        *(_UNITS[model.activation] if model.options.gated_unit else plain_ffn).split(),
        *("--attention-variant", model.variant.name),
    ]
    if model.latent is not None:
        flags += ["--multi-latent-attention", "--rope-type", "yarn" if model.yarn else "rope"]
        flags += _given(model.latent)
    if model.groups != model.heads:
        flags += ["--group-query-attention", "--num-query-groups", model.groups]
    if (export := model.variant.export) and export.kind_option:
        flags += [flag_of(export.kind_option), model.attention]
    if model.variant_layers:
        flags += ["--attention-variant-layers", _by_layer(model.variant_layers)]
    if model.delta_net:
        flags += ["--experimental-attention-variant", "gated_delta_net"]
        flags += ["--linear-attention-freq", _by_layer(model.linear_layers)]
        for name, size in dataclasses.asdict(model.delta_net).items():
            flags += [flag_of(name), size]
    switches = {
        "--disable-bias-linear": not model.bias,
        "--add-qkv-bias": model.qkv_bias and not model.bias,
        "--qk-layernorm": model.qk_norm,
        "--apply-layernorm-1p": model.zero_centred,
        "--untie-embeddings-and-output-weights": not model.tied,
    }
    flags += [flag for flag, is_set in switches.items() if is_set]
    if model.rope_factor is not None:
        flags += ["--use-rope-scaling", "--rope-scaling-factor", _number(model.rope_factor)]
    if model.no_rope:
        flags += ["--no-rope-freq", _by_layer(model.no_rope)]
    flags += [*(_given(model.yarn) if model.yarn else ()), *_windows(model), *_experts(model)]
    others = dataclasses.replace(
        model.options, normalization="RMSNorm", position_embedding_type="rope"
    )
    flags += [word for flag in others.flags() for word in flag.split()]
    if model.dtype != "float32":
        flags.append({"bfloat16": "--bf16", "float16": "--fp16"}[model.dtype])
    words = [str(flag) for flag in flags]
    # A line of flags is split at spaces.
    if unsafe := [*refused(words).values(), *(word for word in words if len(word.split()) != 1)]:
        raise UserError(
            f"config.json does not describe a model: it would set the flag {unsafe[0]!r}"
        )
    return words


def as_line(flags: Sequence[str]) -> str:
    """Return flags as a line for ``$(cat flags.txt)``, quoted only where spaces or quotes are."""
    return " ".join(w if re.fullmatch(r"[^\s'\"\\]+", w) else shlex.quote(w) for w in flags) + "\n"


def _number(value: float) -> str:
    """Format without ".0": --rotary-base is an integer."""
    return str(int(value)) if value == int(value) else str(value)


def _by_layer(chosen: Iterable[bool]) -> str:
    """Return the value of a flag that names layers: [0,1] is the second of two."""
    return f"[{','.join(str(int(each)) for each in chosen)}]"


def _given(record: Latent | Yarn) -> list[str]:
    """Return the flags of a record's fields, by their arguments."""
    flags = []
    for name, argument in record.ARGUMENTS.items():
        value = getattr(record, name)
        if isinstance(value, bool):
            flags.append(flag_of(argument) if value else f"--no-{flag_of(argument)[2:]}")
        elif value is not None:
            flags += [flag_of(argument), _number(value)]
    return flags


def _windows(model: Architecture) -> list[str]:
    window = window_of(model)
    if window is None:
        return []
    flags = ["--window-size", f"{window - 1},0"]
    if None in model.windows:
        flags += ["--window-attn-skip-freq", _by_layer(w is not None for w in model.windows)]
    return flags


def _experts(model: Architecture) -> list[str | int]:
    if not model.experts:
        return []
    flags: list[str | int] = [
        *("--num-experts", model.experts),
        *("--moe-ffn-hidden-size", model.ffn),
        *("--moe-router-topk", model.topk),
        *("--moe-router-load-balancing-type", "aux_loss"),
    ]
    if not model.renormalize and not model.options.sigmoid_router:
        flags.append("--moe-router-pre-softmax")
    if model.dense_layers:
        has_experts = (layer >= model.dense_layers for layer in range(model.layers))
        flags += ["--moe-layer-freq", _by_layer(has_experts)]
    if model.expert_groups:
        groups, chosen = model.expert_groups
        flags += ["--moe-router-num-groups", groups, "--moe-router-group-topk", chosen]
    if model.shared_ffn:
        flags += ["--moe-shared-expert-intermediate-size", model.shared_ffn]
    if model.shared_gate:
        flags.append("--moe-shared-expert-gate")
    return flags
