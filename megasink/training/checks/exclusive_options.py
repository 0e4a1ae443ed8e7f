"""Options that exclude each other, megasink's and Megatron's."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megasink.options.dataclass_flags import flag_of
from megasink.options.megatron_flags import FLAGS, given_of

_ONLY_IN_PATTERN = "separate the stages with | in the pattern"
_ANOTHER_GELU = "TransformerEngine's activations differ (its gelu is an approximation)"
_OTHER_RATES = (
    ("decoupled_lr", None, "both set the same learning rates"),
    ("use_mup", False, "muP sets these learning rates"),
)
_NOT_LATENT = "this combination is not tested"
# Megatron's fused gated units ignore them, and the others do not (mlp.py:300).
_LIMITS = (
    ("glu_linear_offset", 0.0, "the second flag needs --quick-geglu"),
    ("activation_func_clamp_value", None, "the second flag needs --quick-geglu"),
)
_PACKED = "dataloader_inter_document_masking"
# Option -> (another's name, its allowed value or tuple of values, why not both).
EXCLUDED: dict[str, tuple[tuple[str, Any, str], ...]] = {
    # Megatron's flags for parts of the pattern.
    "hybrid_layer_pattern": (
        ("num_layers_per_virtual_pipeline_stage", None, "for virtual stages, add | to the pattern"),
        ("num_virtual_stages_per_pipeline_rank", None, "for virtual stages, add | to the pattern"),
        ("pipeline_model_parallel_layout", None, _ONLY_IN_PATTERN),
        ("decoder_first_pipeline_num_layers", None, _ONLY_IN_PATTERN),
        ("decoder_last_pipeline_num_layers", None, _ONLY_IN_PATTERN),
        ("account_for_embedding_in_pipeline_split", False, _ONLY_IN_PATTERN),
        ("account_for_loss_in_pipeline_split", False, _ONLY_IN_PATTERN),
        ("moe_layer_freq", 1, "mark layers with experts by E in the pattern"),
    ),
    # Flags that layers of multi-token prediction would ignore, or that no test covers.
    "mtp_num_layers": (
        ("dataloader_inter_document_masking", False, "predictions would cross documents"),
        ("context_parallel_size", 1, "the loss would average over different targets on each rank"),
        ("pipeline_model_parallel_layout", None, "prediction layers are on the last stage"),
        ("post_norm", False, "prediction layers already end in a norm"),
        ("norm_without_gain", False, "the norms of prediction layers have gains"),
        ("embedding_norm", False, "the last stage also reads the embeddings"),
        ("sinusoidal_position_embedding", False, "the last stage also reads the embeddings"),
    ),
    "multi_latent_attention": (
        ("group_query_attention", False, "every head of latent attention has its own keys"),
        ("use_rope_scaling", False, "--rope-type yarn extends the context of latent attention"),
        ("rotary_interleaved", False, "latent attention has a fixed order of channels"),
        ("rotary_seq_len_interpolation_factor", None, "latent attention ignores the second flag"),
        ("no_rope_freq", None, "latent attention ignores the second flag"),
        ("rotary_percent", 1.0, "--qk-pos-emb-head-dim sets the rotated width"),
        ("attention_bias_type", "none", "latent attention rotates a part of each head"),
        ("add_qkv_bias", False, "the projections of latent attention have no biases"),
        ("qk_l2_norm", False, "use --qk-layernorm to norm the latents"),
        ("attention_similarity", "softmax", _NOT_LATENT),
        ("sdpa_output_norm", "none", _NOT_LATENT),
        ("gate_position", "sdpa", _NOT_LATENT),
        ("switch_heads", "none", _NOT_LATENT),
        ("multi_head_addition", False, _NOT_LATENT),
        ("norm_without_gain", False, _NOT_LATENT),
        ("post_norm", False, _NOT_LATENT),
        ("attention_variant_layers", None, _NOT_LATENT),
        ("window_size", None, _NOT_LATENT),
        ("prefix_lm_tokens", 0, _NOT_LATENT),
        ("match_ffn_width", False, _NOT_LATENT),
        ("use_mup", False, _NOT_LATENT),
        ("optimizer", ("adam", "sgd"), _NOT_LATENT),
    ),
    # TransformerEngine's FFN: its gelu is the tanh approximation, and its norms cannot be removed.
    "ffn_activation": (
        ("use_te_activation_func", False, _ANOTHER_GELU),
        ("use_transformer_engine_op_fuser", False, _ANOTHER_GELU),
        *_LIMITS,
    ),
    "swiglu": _LIMITS,
    "fp16": (("bf16", False, "a run has one data type"),),
    "fp8": (("fp8_param_gather", False, "initial weights are drawn in bf16"),),
    "async_save": (
        ("async_ckpt_use_cpu_shm", False, "only --async-strategy nvrx supports shared memory"),
        ("async_strategy", ("mcore",), "the writer of this strategy may outlive a killed rank"),
        ("ckpt_format", ("torch_dist",), "only torch_dist is saved in the background"),
    ),
    "embedding_lr": _OTHER_RATES,
    "output_lr": _OTHER_RATES,
    "sandwich_norm": (
        ("post_norm", False, "a layer can have only one of these norms"),
        ("residual_clip", None, "the order of norm and clipping is not defined"),
    ),
    "post_norm": (
        ("fp32_residual_connection", False, "the norm would pass float32 to the next layer"),
        ("use_transformer_engine_op_fuser", False, "the norm in the fused FFN cannot be removed"),
    ),
    "norm_without_gain": (
        ("use_transformer_engine_op_fuser", False, "the norm in the fused FFN has a weight"),
        ("qk_layernorm", False, "use --qk-l2-norm, which has no weights"),
    ),
    "multi_head_addition": (
        ("delay_wgrad_compute", False, "the output projection cannot delay its weight gradient"),
    ),
    "match_ffn_width": (
        ("num_experts", 0, "only dense models"),
        ("attention_variant_layers", None, "the FFN width assumes a gate in every layer"),
    ),
    "attention_variant_layers": (
        ("hybrid_layer_pattern", None, "all attention layers (*) of a pattern have the variant"),
    ),
    "sink_token": (
        ("prefix_lm_tokens", 0, "the sink token starts the sequence, not the prefix"),
        (_PACKED, False, "the sink token starts the sequence, not each document"),
    ),
    "prefix_lm_tokens": (
        ("window_size", None, "every token must see the prefix"),
        (_PACKED, False, "a document may end inside the prefix"),
        ("attention_bias_type", "none", "the bias is not defined for keys after the query"),
    ),
    "log_sink_rate": (
        (_PACKED, False, "the rate needs 64 tokens, and documents may be shorter"),
        ("sink_token", False, "the first token would not be part of the text"),
        ("context_parallel_size", 1, "only one rank has the first tokens"),
    ),
}


def excluded(args: Namespace) -> Iterator[str]:
    """Yield a message for each pair of given options that exclude each other."""
    for option, others in EXCLUDED.items():
        if getattr(args, option):
            name = flag_of(FLAGS.get(option, option))
            for flag, _, why in given_of(args, others):
                yield f"choose either {name} or {flag}: {why}"
