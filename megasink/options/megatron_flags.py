"""Megatron flags with special treatment, by the names of parsed arguments.

`KNOWN` has the properties of accepted flags, `REFUSED` the reasons. Others pass unchanged.
"""

import ast
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from megasink.config import IGNORED
from megasink.options.dataclass_flags import flag_of

# Names, and after the colon the properties of all of them:
#   shape    a converted model fixes it; model: it identifies a model, too; context: fine-tuning may
#            change it; run: it identifies a run beside its model
#   described  Megatron's configuration of a model reads it under another name
#   process  of the layout or this process: a process that reads a run keeps its own value
#   needed   a run must give it; needed-to-train: unless it only evaluates
#   count    1 or more; amount: 0 or more; positive: more than 0; share: 0 or more, and less than 1
#   text     its text only describes: numbers, names, patterns; read: it names files, which run no
#            code; written: folders; in those of the run a file may say so
#   place    a folder that cannot be in an object store; host: another path on another host
#   length, warmup, decay, activation, norm, data: only one of each may be given
#   package  it needs a package of the machine that trains; outside: it reads checkpoints, writes or
#            connects: a plan drops both
_KNOWN = """
num_layers hidden_size num_attention_heads: shape needed count
ffn_hidden_size kv_channels num_query_groups: shape count
position_embedding_type untie_embeddings_and_output_weights group_query_attention: shape described
normalization layernorm_epsilon add_bias_linear: shape
qk_layernorm: shape norm
seq_length: context needed count
max_position_embeddings: context described needed count
rotary_base: shape context described
use_rope_scaling rope_scaling_factor: context described
rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow: context
mscale mscale_all_dim: context
window_size window_attn_skip_freq: context text
multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim: model
v_head_dim moe_router_num_groups moe_router_group_topk: model
rotary_percent: model described
swiglu squared_relu: model described activation
rotary_interleaved add_qkv_bias mamba_state_dim: model
layernorm_zero_centered_gamma: model package
use_mup mup_embedding_mult mup_output_mult mup_base_head_dim mup_base_hidden_size: model
mup_attn_scale_power: model
qk_l2_norm: model norm
openai_gelu: model activation
hybrid_layer_pattern no_rope_freq moe_layer_freq: model text
mamba_head_dim mamba_num_groups mamba_num_heads linear_conv_kernel_dim linear_key_head_dim: model
linear_value_head_dim linear_num_key_heads linear_num_value_heads moe_router_topk: model
moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_score_function: model
moe_shared_expert_gate: model
moe_router_pre_softmax moe_router_enable_expert_bias moe_router_topk_scaling_factor: model
num_experts: model described count
tokenizer_type: model
tokenizer_model: model read host
vocab_size: model count
make_vocab_size_divisible_by: model described count
rope_type rotary_seq_len_interpolation_factor init_method_xavier_uniform: described
no_persist_layer_norm fp16_lm_cross_entropy bias_swiglu_fusion bias_gelu_fusion: described
yarn_correction_range_round_to_int: context described
variable_seq_lengths sink_token_id: described
padded_vocab_size: described count
quick_geglu: described activation
seed: run described amount
global_batch_size: run described count
data_path: run read data
split: run text
bf16 fp16: run
micro_batch_size: needed count
train_iters: needed-to-train count length
train_samples: count length
lr: needed-to-train amount
min_lr weight_decay clip_grad eval_iters num_workers init_method_std lr_warmup_init: amount
head_balance_coeff: amount
head_balance_shared_heads head_balance_shared_refresh head_heatmap_interval: amount
prefix_lm_tokens sink_lr_mult sink_weight_decay: amount
residual_clip logit_softcap attention_scale_alpha bias_fixed_value_norm: positive
embedding_lr output_lr stop_on_divergence: positive
lr_warmup_iters lr_warmup_samples: amount warmup
lr_warmup_fraction: warmup share
lr_wsd_decay_iters lr_wsd_decay_samples: amount decay
lr_wsd_decay_fraction: decay
ffn_activation: activation
attention_dropout hidden_dropout: share
log_interval eval_interval save_interval save_retain_interval exit_interval: count
gpu_sniff_test_interval: count outside
num_dataset_builder_threads mtp_num_layers: count
eval_micro_batch_size eval_global_batch_size: count
tensor_model_parallel_size pipeline_model_parallel_size: process count
expert_model_parallel_size: process count
rank world_size local_rank data_parallel_size inprocess_active_world_size: process
context_parallel_size transformer_pipeline_model_parallel_size: process
virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage: process
num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers: process
decoder_last_pipeline_num_layers microbatch_group_size_per_vp_stage: process
account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split: process
expert_tensor_parallel_size tensor_parallel_num_weight_shards: process
expert_tensor_parallel_num_weight_shards sequence_parallel overlap_p2p_comm: process
tp_comm_overlap defer_embedding_wgrad_compute recompute_granularity recompute_method: process
recompute_num_layers fine_grained_activation_offloading offload_modules: process
cpu_offloading_num_layers gradient_accumulation_fusion inference_cuda_graph_scope: process
attention_backend gtp_weight_remat_size expert_gtp_weight_remat_size flash_decode: process
perform_initialization unknown_flags: process
recompute_modules pipeline_model_parallel_layout: process text
cp_comm_type hybrid_override_pattern linear_attention_freq muon_coefficient_type: text
phase_transition_iterations step_batch_size_schedule validation_set_names: text
onnx_safe: text activation
vocab_file merge_file test_data_path valid_data_path: read
data_args_path per_split_data_args_path: read
train_data_path: read data
mock_data: data
load: read place host outside
pretrained_checkpoint: read place outside
save tensorboard_dir wandb_save_dir: written place host outside
data_cache_path: written place host
object_storage_cache_path non_persistent_global_ckpt_dir: place
use_checkpoint_args wandb_project wandb_entity wandb_exp_name async_save async_strategy: outside
exit_on_missing_checkpoint enable_msc profile log_straggler record_memory_history: outside
fp8 fp8_param_gather optimizer_cpu_offload use_te_activation_func moe_enable_deepep: package
moe_router_padding_for_quantization moe_router_padding_for_fp8: package
reuse_grad_buf_for_mxfp8_param_ag: package
"""
KNOWN: dict[str, frozenset[str]] = {
    name: frozenset(facts.split())
    for names, _, facts in (line.partition(":") for line in _KNOWN.strip().splitlines())
    for name in names.split()
}
"""The properties of each name."""

_CHOICES = """
async-strategy attention-backend ckpt-format ckpt-fully-parallel-load-exchange-algo
ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save-process-group
cross-entropy-fusion-impl cuda-graph-impl data-parallel-sharding-strategy dataloader-type
dist-ckpt-strictness distributed-backend empty-unused-memory-level exit-signal exp-avg-dtype
exp-avg-sq-dtype experimental-attention-variant flash-attention-version fp4-format fp4-recipe
fp8-amax-compute-algo fp8-format fp8-recipe inference-cuda-graph-scope lr-decay-style
lr-wsd-decay-style main-grads-dtype main-params-dtype mamba-training-ssm-states-dtype
moe-flex-dispatcher-backend moe-router-dtype moe-router-load-balancing-type
moe-router-score-function moe-token-dispatcher-type moe-token-drop-policy muon-fp32-matmul-prec
muon-scalar-optimizer muon-scale-mode muon-tp-mode no-weight-decay-cond-type
non-persistent-ckpt-type non-persistent-local-ckpt-algo normalization optimizer
outer-dp-sharding-strategy pipeline-model-parallel-comm-backend position-embedding-type
recompute-granularity recompute-method rerun-mode rope-type sharp-enabled-group softmax-type
symmetric-ar-type tiktoken-pattern timing-log-level timing-log-option tokenizer-type
tp-comm-bootstrap-backend transformer-impl weight-decay-incr-style
"""
CHOICES = frozenset(_CHOICES.split())
"""Flags (without dashes) that Megatron's parser restricts to a few values."""


def having(*facts: str) -> tuple[str, ...]:
    """Return the names of the flags with one of these properties."""
    return tuple(name for name, known in KNOWN.items() if known.intersection(facts))


# Flags with a different name.
FLAGS = {"fp4": "fp4_format", "fp8": "fp8_format"}
FLAGS |= {"layernorm_zero_centered_gamma": "apply_layernorm_1p"}


def rows(text: str) -> tuple[tuple[str, Any, str], ...]:
    """Return (name, the accepted value or a tuple of them, why) for lines "NAME NAME=VALUE: WHY".

    The value is False if a line has none; None and the absence of a flag are always accepted.
    """
    found = []
    for names, _, why in (line.partition(":") for line in text.strip().splitlines()):
        for name, _, fine in (word.partition("=") for word in names.split()):
            found.append((name, ast.literal_eval(fine or "False"), why.strip()))
    return tuple(found)


# Options that change attention, the loss or the weights in ways that no test covers; the last lines
# are old names. clip_grads.py:138 waits for the gradient norm. A test set, or a single validation
# set, stops --full-validation (megatron/training/training.py:4365,4382).
_ALWAYS = """
cache_mla_latents: decoding from cached latents supports no sinks or gates
mla_down_proj_fusion moe_latent_size=None: not tested
mtp_hybrid_override_pattern=None: add /*- to --hybrid-layer-pattern instead
heterogeneous_layers_config_path=None: GPT only
experimental_attention_variant=None: for gated delta-net, use --hybrid-layer-pattern with G layers
reset_attention_mask: has S x S masks: use --dataloader-inter-document-masking
sft sft_tokenizer_prompt_format='nemotron-h-aligned' chat_template=None: \
use megasink finetune, which trains on conversations with the tokenizer's template
fim_data freeze_all_layers init_model_with_meta_device: not supported
allow_ambiguous_pad_tokens: megasink never treats tokens of a text as padding
sample_rate=1.0 mask_prob=0.15 short_seq_prob=0.1 decoder_seq_length=None: \
Megatron's GPT datasets ignore this flag: drop it
dataloader_type=('single',): sample order would depend on the parallel layout
per_dataset_sequences_path=None dataloader_fast_cache_load dataloader_defer_npy_index_mmap: \
megasink reads the index of every data set at the start: drop the flag
apply_residual_connection_post_layernorm: \
Megatron's layers ignore this flag: use --post-norm or --sandwich-norm
fp4=None: FP4 linear layers are not tested: use --bf16
use_kitchen_attention: use --attention-kernel
batch_invariant_mode: not supported: this mode replaces Megatron's kernels
use_torch_fsdp2 use_megatron_fsdp: use --use-distributed-optimizer
tensor_parallel_num_weight_shards=1 expert_tensor_parallel_num_weight_shards=1 \
moe_single_grouped_weight moe_single_grouped_bias: \
initial weights would depend on the parallel layout
data_parallel_random_init: all replicas must start with equal weights
cuda_graph_impl='none' enable_cuda_graph external_cuda_graph: \
a replayed CUDA graph neither counts tokens nor updates the loss (docs/gpu.md)
optimizer_cuda_graph: the optimizer step reads the gradient norm on the host
cpu_offloading_num_layers=0 moe_paged_stash: use --recompute-granularity to save memory
moe_use_upcycling: start the MoE model from its own initial weights
logits_save_dir=None: megasink's forward step does not return logits
logits_load_dir=None: distillation is not supported
full_validation: this flag fails in Megatron: use --eval-iters
multiple_validation_sets: this flag needs --full-validation, which fails
perform_rl_step: pre-training only
enable_ft_package: Megatron does not work with the released nvidia-resiliency-ext: use torchrun
inprocess_restart: works only in Megatron's own script: use torchrun's --max-restarts
spec=None: megasink has its own layer specs: drop the flag
attention_output_gate: \
use --attention-variant gated --gate-granularity elementwise, with the same weights
hybrid_context_parallel: the process groups would change with every batch
hierarchical_context_parallel_sizes=None: \
only --cp-comm-type a2a+p2p uses this flag, and it is not supported
exit_signal_handler_for_training: the run would end without a checkpoint
batch_size=None: use --micro-batch-size
warmup=None: use --lr-warmup-fraction
model_parallel_size=None: use --tensor-model-parallel-size
checkpoint_activations: use --recompute-activations
"""
# Parts of the trainer that call the CUDA driver directly.
_WITHOUT_CUDA = """
profile record_memory_history log_straggler gpu_sniff_test_interval=None:
layernorm_zero_centered_gamma: needs TransformerEngine's norms and CUDA
defer_embedding_wgrad_compute optimizer_cpu_offload:
"""
_WITHOUT_TRANSFORMER_ENGINE = """
transformer_impl=('local','inference_optimized') te_rng_tracker use_transformer_engine_op_fuser:
fused_residual_rmsnorm tp_comm_overlap delay_wgrad_compute use_precision_aware_optimizer:
"""
# Whatever the value; nor does a file set text that is not `KNOWN`.
_IN_A_FILE = """
adlr_autoresume=None trust_remote_code=None use_checkpoint_args=None: it imports or runs code
use_mp_args_from_checkpoint_args=None: it imports or runs code
enable_ft_package=None enable_msc=None inference_wandb_logging=None: it opens network connections
inprocess_restart=None log_straggler=None perform_rl_step=None: it opens network connections
run_workload_inspector_server=None: it opens network connections
record_memory_history=None: it writes elsewhere
"""
# They name files, folders and modules to import.
_IN_A_SAVED_MODEL = """
spec=None fp8_quantizer_factory=None fp4_quantizer_factory=None: it imports or runs code
config_logger_dir=None: it writes elsewhere
kitchen_config_file=None kitchen_recipe_number=None: it reads other files
te_precision_config_file=None heterogeneous_layers_config_path=None: it reads other files
mtp_hybrid_override_pattern=None: not supported
"""
# No architecture of transformers has it.
_IN_AN_EXPORT = """
rotary_seq_len_interpolation_factor=None mtp_num_layers=0: exports support only None
moe_mlp_glu_interleave_size=None mup_base_hidden_size=None: exports support only None
moe_shared_expert_glu_interleave_size=None: exports support only None
heterogeneous_layers_config_path=None moe_latent_size=None: exports support only None
experimental_attention_variant=None: exports support only None
rotary_interleaved openai_gelu attention_output_gate: exports support only False
apply_residual_connection_post_layernorm: exports support only False
moe_apply_probs_on_input: exports support only False
moe_router_quantile_balancing_ema=0.0: exports support only 0.0
mup_attn_scale_power=1.0: exports support only 1.0
"""
REFUSED: dict[str, tuple[tuple[str, Any, str], ...]] = {
    "always": (*IGNORED, *rows(_ALWAYS)),
    "without CUDA": rows(_WITHOUT_CUDA),
    "without TransformerEngine": rows(_WITHOUT_TRANSFORMER_ENGINE),
    "without TransformerEngine's experts": rows(
        "moe_grouped_gemm moe_permute_fusion moe_router_fusion:"
    ),
    "without apex": rows("defer_embedding_wgrad_compute:"),
    "in a file": rows(_IN_A_FILE),
    "in a saved model": rows(_IN_A_SAVED_MODEL),
    "in an export": rows(_IN_AN_EXPORT),
}
"""When flags are refused -> `rows`, with the reason or the alternative."""


def flags_refused(when: str) -> set[str]:
    """Return the flags under a key of `REFUSED`."""
    return {flag_of(FLAGS.get(name, name)) for name, *_ in REFUSED[when]}


def refused(args: Namespace | Mapping[str, Any], when: str) -> Iterator[tuple[str, Any, str]]:
    """Yield (flag, value, why) for each given flag that is refused."""
    yield from given_of(args, REFUSED[when])


def given_of(
    args: Namespace | Mapping[str, Any], others: tuple[tuple[str, Any, str], ...]
) -> Iterator[tuple[str, Any, str]]:
    """Yield (flag, its value, why) for each given flag of `others`."""
    given = args if isinstance(args, Mapping) else vars(args)
    for name, fine, why in others:
        value = given.get(name)
        if value is not None and value not in (fine if isinstance(fine, tuple) else (fine,)):
            yield flag_of(FLAGS.get(name, name)), value, why
