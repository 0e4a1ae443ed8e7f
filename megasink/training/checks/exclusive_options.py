"""Options that exclude each other, megasink's and Megatron's."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megasink.options.dataclass_flags import flag_of
from megasink.options.megatron_flags import FLAGS, given_of, rows

# An option, and the `rows` of those that exclude it. Megatron's fused gated units ignore the two
# limits (mlp.py:300); layers of multi-token prediction would ignore some flags, or no test covers
# them; TransformerEngine's gelu is the tanh approximation, and its norms cannot be removed.
_EXCLUDED = """
hybrid_layer_pattern with num_layers_per_virtual_pipeline_stage=None \
num_virtual_stages_per_pipeline_rank=None: for virtual stages, add | to the pattern
hybrid_layer_pattern with pipeline_model_parallel_layout=None \
decoder_first_pipeline_num_layers=None decoder_last_pipeline_num_layers=None \
account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split: \
separate the stages with | in the pattern
hybrid_layer_pattern with moe_layer_freq=1: mark layers with experts by E in the pattern
mtp_num_layers with dataloader_inter_document_masking: predictions would cross documents
mtp_num_layers with context_parallel_size=1: \
the loss would average over different targets on each rank
mtp_num_layers with pipeline_model_parallel_layout=None: prediction layers are on the last stage
mtp_num_layers with post_norm: prediction layers already end in a norm
mtp_num_layers with norm_without_gain: the norms of prediction layers have gains
mtp_num_layers with embedding_norm sinusoidal_position_embedding: \
the last stage also reads the embeddings
multi_latent_attention with group_query_attention: \
every head of latent attention has its own keys
multi_latent_attention with use_rope_scaling: \
--rope-type yarn extends the context of latent attention
multi_latent_attention with rotary_interleaved: latent attention has a fixed order of channels
multi_latent_attention with rotary_seq_len_interpolation_factor=None no_rope_freq=None: \
latent attention ignores the second flag
multi_latent_attention with rotary_percent=1.0: --qk-pos-emb-head-dim sets the rotated width
multi_latent_attention with attention_bias_type='none': \
latent attention rotates a part of each head
multi_latent_attention with add_qkv_bias: the projections of latent attention have no biases
multi_latent_attention with qk_l2_norm: use --qk-layernorm to norm the latents
multi_latent_attention with attention_similarity='softmax' sdpa_output_norm='none' \
gate_position='sdpa' switch_heads='none' multi_head_addition norm_without_gain post_norm \
attention_variant_layers=None window_size=None prefix_lm_tokens=0 match_ffn_width use_mup \
optimizer=('adam','sgd'): this combination is not tested
ffn_activation with use_te_activation_func use_transformer_engine_op_fuser: \
TransformerEngine's activations differ (its gelu is an approximation)
ffn_activation with glu_linear_offset=0.0 activation_func_clamp_value=None: \
the second flag needs --quick-geglu
swiglu with glu_linear_offset=0.0 activation_func_clamp_value=None: \
the second flag needs --quick-geglu
fp16 with bf16: a run has one data type
fp8 with fp8_param_gather: initial weights are drawn in bf16
async_save with async_ckpt_use_cpu_shm: only --async-strategy nvrx supports shared memory
async_save with async_strategy=('mcore',): the writer of this strategy may outlive a killed rank
async_save with ckpt_format=('torch_dist',): only torch_dist is saved in the background
embedding_lr with decoupled_lr=None: both set the same learning rates
embedding_lr with use_mup: muP sets these learning rates
output_lr with decoupled_lr=None: both set the same learning rates
output_lr with use_mup: muP sets these learning rates
sandwich_norm with post_norm: a layer can have only one of these norms
sandwich_norm with residual_clip=None: the order of norm and clipping is not defined
post_norm with fp32_residual_connection: the norm would pass float32 to the next layer
post_norm with use_transformer_engine_op_fuser: the norm in the fused FFN cannot be removed
norm_without_gain with use_transformer_engine_op_fuser: the norm in the fused FFN has a weight
norm_without_gain with qk_layernorm: use --qk-l2-norm, which has no weights
multi_head_addition with delay_wgrad_compute: \
the output projection cannot delay its weight gradient
match_ffn_width with num_experts=0: only dense models
match_ffn_width with attention_variant_layers=None: the FFN width assumes a gate in every layer
attention_variant_layers with hybrid_layer_pattern=None: \
all attention layers (*) of a pattern have the variant
sink_token with prefix_lm_tokens=0: the sink token starts the sequence, not the prefix
sink_token with dataloader_inter_document_masking: \
the sink token starts the sequence, not each document
prefix_lm_tokens with window_size=None: every token must see the prefix
prefix_lm_tokens with dataloader_inter_document_masking: a document may end inside the prefix
prefix_lm_tokens with attention_bias_type='none': \
the bias is not defined for keys after the query
log_sink_rate with dataloader_inter_document_masking: \
the rate needs 64 tokens, and documents may be shorter
log_sink_rate with sink_token: the first token would not be part of the text
log_sink_rate with context_parallel_size=1: only one rank has the first tokens
"""
EXCLUDED: dict[str, tuple[tuple[str, Any, str], ...]] = {}
for _line in _EXCLUDED.strip().splitlines():
    _option, _, _others = _line.partition(" with ")
    EXCLUDED[_option] = EXCLUDED.get(_option, ()) + rows(_others)


def excluded(args: Namespace) -> Iterator[str]:
    """Yield a message for each pair of given options that exclude each other."""
    for option, others in EXCLUDED.items():
        if getattr(args, option):
            name = flag_of(FLAGS.get(option, option))
            for flag, _, why in given_of(args, others):
                yield f"choose either {name} or {flag}: {why}"
