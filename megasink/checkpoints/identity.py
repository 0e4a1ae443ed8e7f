"""Arguments that define a run's model: they must match for a checkpoint to be loaded."""

import dataclasses
from typing import Any

from megasink.config import MODEL_OPTIONS
from megasink.megatron.hybrid_pattern import layers_of

SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "position_embedding_type",
    "rotary_base",
    "normalization",
    "layernorm_epsilon",
    "add_bias_linear",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "attention_variant",
    "attention_variant_layers",
    "gate_granularity",
)
"""Arguments that a converted model fixes; its data and tokenizer are free."""

# These select how to compute and train, not the model.
_NOT_THE_MODEL = {"attention_kernel", "sink_lr_mult", "sink_weight_decay"}
_OPTIONS = tuple(
    entry.name
    for options in MODEL_OPTIONS
    for entry in dataclasses.fields(options)
    if entry.name not in _NOT_THE_MODEL
)

CONTEXT = (
    "seq_length",
    "max_position_embeddings",
    "rotary_base",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "mscale",
    "mscale_all_dim",
    "window_size",
    "window_attn_skip_freq",
)
"""Arguments that fine-tuning may change: the weights fit, and the model learns the rest (P1.37)."""

MODEL = (
    *SHAPE,
    *(name for name in CONTEXT if name not in SHAPE),
    *(name for name in _OPTIONS if name not in SHAPE),
    "rotary_percent",
    "rotary_interleaved",
    "no_rope_freq",
    "layernorm_zero_centered_gamma",
    "add_qkv_bias",
    "swiglu",
    "squared_relu",
    "qk_l2_norm",
    "openai_gelu",
    "hybrid_layer_pattern",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "num_experts",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor",
    "tokenizer_type",
    "tokenizer_model",
    "vocab_size",
    "make_vocab_size_divisible_by",
)
"""Every argument that defines the model."""


def same(name: str, before: Any, now: Any, *, finetune: bool = False) -> bool:
    """Whether two values of a `MODEL` argument allow one run to start from another's weights.

    Args:
        finetune: allow a different context length and position encoding. RoPE and YaRN have no
            weights, so either can replace the other.
    """
    if name == "hybrid_layer_pattern" and before and now:
        before, now = layers_of(before), layers_of(now)  # the stages are of the layout
    if before == now:
        return True
    if not finetune:
        return False
    return name in CONTEXT or (
        name == "position_embedding_type" and {before, now} <= {"rope", "yarn"}
    )


def plain(value: Any) -> Any:
    """Convert an argument value to what JSON would return for it."""
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "name", None) or str(value)
