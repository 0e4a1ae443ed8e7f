"""Options that exclude each other, megasink's and Megatron's."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megasink.options.flags import flag_of
from megasink.options.megatron_flags import FLAGS, given_of

_ONLY_IN_PATTERN = "separate the stages with |"
_ANOTHER_GELU = "TransformerEngine's activations differ (its gelu is an approximation)"
_OTHER_RATES = (
    ("decoupled_lr", None, "it sets the same rates"),
    ("use_mup", False, "muP sets these rates"),
)
_NOT_LATENT = "never run together"
_PACKED = "dataloader_inter_document_masking"
# Option -> (another's name, its allowed value or tuple of values, why not both).
EXCLUDED: dict[str, tuple[tuple[str, Any, str], ...]] = {
    # Megatron's flags for parts of the pattern.
    "hybrid_layer_pattern": (
        ("num_layers_per_virtual_pipeline_stage", None, "give more stages between |"),
        ("num_virtual_stages_per_pipeline_rank", None, "give more stages between |"),
        ("pipeline_model_parallel_layout", None, _ONLY_IN_PATTERN),
        ("decoder_first_pipeline_num_layers", None, _ONLY_IN_PATTERN),
        ("decoder_last_pipeline_num_layers", None, _ONLY_IN_PATTERN),
        ("account_for_embedding_in_pipeline_split", False, _ONLY_IN_PATTERN),
        ("account_for_loss_in_pipeline_split", False, _ONLY_IN_PATTERN),
        ("moe_layer_freq", 1, "layers with experts are those marked E"),
    ),
    # Flags that layers of multi-token prediction would ignore, or that no test covers.
    "mtp_num_layers": (
        ("dataloader_inter_document_masking", False, "it would predict across documents"),
        ("context_parallel_size", 1, "its loss is a mean over each rank's targets, which differ"),
        ("pipeline_model_parallel_layout", None, "its layers are on the last stage"),
        ("post_norm", False, "its layers end in a norm of their own"),
        ("norm_without_gain", False, "its norms have gains"),
        ("embedding_norm", False, "it reads the embeddings on the last stage"),
        ("sinusoidal_position_embedding", False, "it reads the embeddings on the last stage"),
    ),
    "multi_latent_attention": (
        ("group_query_attention", False, "its heads have keys of their own"),
        ("use_rope_scaling", False, "--rope-type yarn extends its context"),
        ("rotary_interleaved", False, "its channels have one order"),
        ("rotary_seq_len_interpolation_factor", None, "its rotation ignores it"),
        ("no_rope_freq", None, "its rotation ignores it"),
        ("rotary_percent", 1.0, "--qk-pos-emb-head-dim is the width that it rotates"),
        ("attention_bias_type", "none", "it rotates a part of each head"),
        ("add_qkv_bias", False, "its projections have none"),
        ("qk_l2_norm", False, "--qk-layernorm norms its latents"),
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
    ),
    "fp16": (("bf16", False, "a run has one data type"),),
    "fp8": (("fp8_param_gather", False, "initial weights are drawn in bf16"),),
    "async_save": (
        ("async_ckpt_use_cpu_shm", False, "it works only with --async-strategy nvrx"),
        ("async_strategy", ("mcore",), "its writer may outlive a rank that is killed"),
        ("ckpt_format", ("torch_dist",), "only torch_dist is written in the background"),
    ),
    "embedding_lr": _OTHER_RATES,
    "output_lr": _OTHER_RATES,
    "sandwich_norm": (
        ("post_norm", False, "a layer has one of them"),
        ("residual_clip", None, "their order is not defined"),
    ),
    "post_norm": (
        ("fp32_residual_connection", False, "its norm would pass float32 to the next layer"),
        ("use_transformer_engine_op_fuser", False, "the norm in its FFN cannot be removed"),
    ),
    "norm_without_gain": (
        ("use_transformer_engine_op_fuser", False, "the norm in its FFN has a weight"),
        ("qk_layernorm", False, "its norms have weights (--qk-l2-norm has none)"),
    ),
    "multi_head_addition": (
        ("delay_wgrad_compute", False, "the projection of the sum does not defer its gradient"),
    ),
    "match_ffn_width": (
        ("num_experts", 0, "only dense models"),
        ("attention_variant_layers", None, "it counts a gate in every layer"),
    ),
    "attention_variant_layers": (
        ("hybrid_layer_pattern", None, "all attention layers (*) have the variant"),
    ),
    "sink_token": (
        ("prefix_lm_tokens", 0, "it starts a sequence, not its prefix"),
        (_PACKED, False, "it starts a sequence, not a document"),
    ),
    "prefix_lm_tokens": (
        ("window_size", None, "every token must see the prefix"),
        (_PACKED, False, "a document may end inside the prefix"),
        ("attention_bias_type", "none", "the bias is not defined for keys after the query"),
    ),
    "log_sink_rate": (
        (_PACKED, False, "documents vary in length"),
        ("sink_token", False, "the first token is not part of the text"),
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
