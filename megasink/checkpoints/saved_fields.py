"""The types and ranges of a run's saved arguments that describe its model."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field

from megasink.config import FACTORS, MODEL_OPTIONS
from megasink.files.checked_fields import (
    Count,
    Epsilon,
    Experts,
    Layers,
    Number,
    Positive,
    Share,
    check,
    fields,
)

_FLAGS = (
    "add_bias_linear add_qkv_bias bf16 fp16 group_query_attention layernorm_zero_centered_gamma "
    "moe_router_enable_expert_bias moe_router_pre_softmax qk_layernorm qk_l2_norm quick_geglu "
    "rotary_interleaved squared_relu swiglu untie_embeddings_and_output_weights use_rope_scaling"
)
# Types of our own options are in config.py; these are Megatron's options that readers compute with.
# An option that a run leaves open is null.
_FIELDS = fields(
    {hint: kind for options in MODEL_OPTIONS for hint, kind in get_type_hints(options).items()}
    | dict.fromkeys(_FLAGS.split(), bool | None)
    | dict.fromkeys(("num_query_groups", "kv_channels"), Count | None)
    | dict.fromkeys(("num_experts", "vocab_size", "sink_token_id"), Experts | None)
    | dict.fromkeys(("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"), Count | None)
    | dict.fromkeys(("yarn_beta_fast", "yarn_beta_slow", "mscale", "mscale_all_dim"), Number | None)
    | {
        "num_layers": Layers,
        "hidden_size": Count,
        "ffn_hidden_size": Count,
        "num_attention_heads": Count,
        "padded_vocab_size": Count,
        "max_position_embeddings": Count,
        "layernorm_epsilon": Epsilon,
        "rotary_base": Positive,
        "rotary_percent": Share,
        "init_method_std": Annotated[float, Field(ge=0, le=1e3)] | None,
        "rope_scaling_factor": Positive | None,
        "rotary_scaling_factor": Positive | None,
        "yarn_original_max_position_embeddings": Count | None,
        "moe_router_topk": Count | None,
        "moe_router_topk_scaling_factor": Number | None,
        "moe_router_score_function": str,
        "normalization": Literal["LayerNorm", "RMSNorm"],
        "position_embedding_type": Literal[
            "learned_absolute", "rope", "mrope", "yarn", "relative", "none"
        ],
        **dict.fromkeys(FACTORS, Positive | None),
        "tokenizer_type": str | None,
        "tokenizer_model": str | None,
        "window_size": Annotated[list[int], Field(min_length=2, max_length=2)] | None,
        "window_attn_skip_freq": int | list[int] | None,
        "hybrid_layer_pattern": str | None,
    }
)


def check_fields(saved: Mapping[str, Any], where: str) -> None:
    """Check saved arguments."""
    check(_FIELDS, saved, where)
