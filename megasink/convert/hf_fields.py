"""Types and ranges of the keys of a config.json that an import computes with or hands on."""

from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field

from megasink.checked_fields import (
    FACTORS,
    Count,
    Epsilon,
    Experts,
    Layers,
    Number,
    Positive,
    Share,
    fields,
)
from megasink.convert.megasink_model import MegasinkOptions

# Null is "not said" in files of transformers; without these there is no model.
_SIZES = "vocab_size hidden_size intermediate_size num_attention_heads max_position_embeddings"
_COUNTS = (
    "num_key_value_heads head_dim sliding_window moe_intermediate_size decoder_sparse_step "
    "full_attention_interval"
)
_NUMBERS_OF_EXPERTS = (
    "num_experts num_local_experts num_experts_per_tok shared_intermediate_size "
    "shared_expert_intermediate_size max_window_layers"
)
_FLAGS = (
    "tie_word_embeddings attention_bias mlp_bias use_sliding_window norm_topk_prob "
    "use_sandwich_norm use_attention_gate use_cache output_router_logits qk_norm qkv_bias "
    "linear_bias zero_centred_norms"
)
_NUMBERS = (
    "embedding_multiplier logits_scaling residual_multiplier swiglu_alpha swiglu_limit "
    "final_logit_softcapping router_aux_loss_coef router_jitter_noise"
)
_TOKEN = Annotated[int, Field(ge=-1, le=2**31 - 1)]
_TOKENS = dict.fromkeys(
    ("eos_token_id", "bos_token_id", "pad_token_id"), _TOKEN | list[_TOKEN] | None
)
_DTYPE = Literal["float32", "bfloat16", "float16"] | None
_ROPE: dict[str, Any] = {
    "rope_type": str | None,
    "type": str | None,
    "rope_theta": Positive | None,
    "factor": Positive | None,
    "partial_rotary_factor": Share | None,
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), Number | None),
    "original_max_position_embeddings": Count | None,
}
_OF_LAYERS = fields(_ROPE)
_PARAMETERS = fields(
    _ROPE | dict.fromkeys(("full_attention", "sliding_attention"), _OF_LAYERS | None)
)

CONFIG = fields(
    {hint: kind | None for hint, kind in get_type_hints(MegasinkOptions).items()}
    | dict.fromkeys(_SIZES.split(), Count)
    | dict.fromkeys(_COUNTS.split(), Count | None)
    | dict.fromkeys(_NUMBERS_OF_EXPERTS.split(), Experts | None)
    | dict.fromkeys(_FLAGS.split(), bool | None)
    | dict.fromkeys(_NUMBERS.split(), Number | None)
    | _TOKENS
    | dict.fromkeys(("dtype", "torch_dtype"), _DTYPE)
    | dict.fromkeys(("rms_norm_eps", "norm_eps"), Epsilon | None)
    | dict.fromkeys(("rope_parameters", "rope_scaling"), _PARAMETERS | None)
    | dict.fromkeys(("attention_dropout", "partial_rotary_factor"), Share | None)
    | {
        "model_type": str,
        "num_hidden_layers": Layers,
        "hidden_act": str | None,
        "initializer_range": Annotated[float, Field(ge=0, le=1e3)] | None,
        "rope_theta": Positive | None,
        "layer_types": list[str] | None,
        "layer_rope_theta": list[Annotated[float, Field(ge=0, le=1e18)] | None] | None,
        "mlp_only_layers": list[int] | None,
        "attention_multiplier": Positive | None,
        **dict.fromkeys(FACTORS, Positive | None),
        "attention_variant": str,
        "attention_variant_layers": list[bool | int] | None,
        "gate_granularity": str | None,
        "quantization_config": dict[str, Any] | None,
        "megasink": fields({"attention": str, "zero_centred": bool}) | None,
    }
)
"""The record of all of them."""
GENERATION = fields(
    _TOKENS
    | dict.fromkeys(("use_cache", "do_sample"), bool | None)
    | dict.fromkeys(("temperature", "top_p", "repetition_penalty"), Number | None)
    | dict.fromkeys(("top_k", "max_new_tokens", "max_length"), Experts | None)
)
"""The record of what a generation_config.json hands on to the next export."""
