"""Families whose config.json has multipliers: Granite and HyperCLOVA X.

Megatron's muP flags carry those of embeddings, scores and logits.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megasink.convert.architecture import Architecture
from megasink.convert.megasink_model import MegasinkOptions
from megasink.convert.targets import rows
from megasink.convert.targets.softmax_families import NO_BIASES, family, whole_heads
from megasink.convert.targets.target_registry import register
from megasink.convert.weight_table import Row

_MULTIPLIERS = dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0)
_MUP = ("use_mup", "mup_embedding_mult", "mup_output_mult", "mup_base_head_dim")
_NORMS = ("input_layernorm", "post_attention_layernorm")


def _with_multipliers(given: MegasinkOptions) -> MegasinkOptions:
    return MegasinkOptions(**{name: getattr(given, name) for name in _MUP})


def _hyperclovax(model: Architecture) -> tuple[Row, ...]:
    after = ("post_norm1", "post_norm2") if model.options.sandwich_norm else ()
    return rows.decoder(model, rows.ffn(model), norms=(*_NORMS, *after))


def _granite_config(model: Architecture) -> dict[str, Any]:
    options, width = model.options, model.head_dim
    base = (options.mup_base_head_dim or 1.0) if options.use_mup else width
    return {
        "embedding_multiplier": options.mup_embedding_mult,
        "residual_multiplier": 1.0,
        "attention_multiplier": base**0.5 / width,
        "logits_scaling": 1.0 / options.mup_output_mult,
    }


def _read_granite(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the multipliers.

    A residual stream divided by the residual multiplier r adds outputs as they are, and its
    RMSNorms give the same with epsilon / r^2: no weight changes.
    """
    residual, logits = config["residual_multiplier"], config["logits_scaling"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    multipliers = {
        "mup_embedding_mult": config["embedding_multiplier"] / residual,
        "mup_output_mult": logits if config["model_type"] == "hyperclovax" else 1.0 / logits,
        "mup_base_head_dim": ((config["attention_multiplier"] or width**-0.5) * width) ** 2,
    }
    options: dict[str, Any] = {name: float(f"{value:.12g}") for name, value in multipliers.items()}
    if list(options.values()) != [1.0, 1.0, width]:
        options["use_mup"] = True
    return {
        "norm_eps": config["rms_norm_eps"] / residual**2,
        "options": MegasinkOptions(
            sandwich_norm=bool(config.get("use_post_norm")),
            **(options if options.get("use_mup") else {}),
        ),
    }


for target in (
    family(
        name="granite",
        architecture="GraniteForCausalLM",
        table=rows.dense,
        fixed=NO_BIASES,
        defaults=_MULTIPLIERS | {"attention_multiplier": 1.0},
        config=_granite_config,
        read=_read_granite,
        misfits=whole_heads,
        options=_with_multipliers,
    ),
    family(
        name="hyperclovax",
        architecture="HyperCLOVAXForCausalLM",
        since="5.9",
        table=_hyperclovax,
        fixed=NO_BIASES | {"residual_multiplier": 1.0},
        defaults=_MULTIPLIERS | {"attention_multiplier": None, "use_post_norm": True},
        config=lambda model: {
            **_granite_config(model),
            "logits_scaling": model.options.mup_output_mult,
            "use_post_norm": model.options.sandwich_norm,
        },
        read=_read_granite,
        options=lambda given: dataclasses.replace(
            _with_multipliers(given), sandwich_norm=given.sandwich_norm
        ),
    ),
):
    register(target)
