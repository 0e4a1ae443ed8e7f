"""Megatron options that megasink refuses, with the reason."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megasink.flags import flag_of

_FLAGS = {"fp4": "--fp4-format"}  # where the attribute has a different name
# Measured by tests/megatron/test_graph.py.
_GRAPHS = "a replayed graph neither counts heads nor updates the balance loss (docs/gpu.md)"
_OFFLOADING = "use --recompute-granularity to save memory"
_CHAT = "make the data with megasink data --chat, by the tokenizer's own template"
_NOT_GPT = "Megatron's GPT datasets ignore it"
_LAYOUT = "initial weights would depend on the layout"

# Megatron options that change attention, the loss or the weights in ways that no test here covers:
# (attribute, allowed value, what to do).
_UNSUPPORTED: tuple[tuple[str, Any, str], ...] = (
    ("multi_latent_attention", False, "sinks in MLA are not supported"),
    ("mtp_hybrid_override_pattern", None, "hybrid models have no multi-token prediction here"),
    ("heterogeneous_layers_config_path", None, "GPT only"),
    (
        "experimental_attention_variant",
        None,
        "for gated delta-net give --hybrid-layer-pattern with layers G",
    ),
    ("reset_attention_mask", False, "S x S masks: use --dataloader-inter-document-masking"),
    ("sft", False, _CHAT),
    ("sft_tokenizer_prompt_format", "nemotron-h-aligned", _CHAT),
    ("chat_template", None, _CHAT),
    ("fim_data", False, "not supported"),
    ("allow_ambiguous_pad_tokens", False, "no token of text is taken for padding"),
    ("sample_rate", 1.0, _NOT_GPT),
    ("mask_prob", 0.15, _NOT_GPT),
    ("short_seq_prob", 0.1, _NOT_GPT),
    ("decoder_seq_length", None, _NOT_GPT),
    ("apply_query_key_layer_scaling", False, "not supported"),
    ("qk_clip", False, "the kernels do not return the maximum logit"),
    ("log_max_attention_logit", False, "the kernels do not return it"),
    (
        "apply_residual_connection_post_layernorm",
        False,
        "Megatron's layers ignore it: use --post-norm or --sandwich-norm",
    ),
    ("use_flash_attn", False, "use --attention-kernel"),
    ("flash_attention_version", None, "use --attention-kernel"),
    ("fp4", None, "FP4 linear layers were never run: use --bf16"),
    ("use_kitchen_attention", False, "use --attention-kernel"),
    ("batch_invariant_mode", False, "it replaces Megatron's kernels"),
    ("use_torch_fsdp2", False, "use --use-distributed-optimizer"),
    ("use_megatron_fsdp", False, "use --use-distributed-optimizer"),
    ("tensor_parallel_num_weight_shards", 1, _LAYOUT),
    ("expert_tensor_parallel_num_weight_shards", 1, _LAYOUT),
    ("data_parallel_random_init", False, "replicas must start equal"),
    ("cuda_graph_impl", "none", _GRAPHS),
    ("enable_cuda_graph", False, _GRAPHS),
    ("external_cuda_graph", False, _GRAPHS),
    # megatron/core/optimizer/clip_grads.py:138 waits for the gradient norm.
    ("optimizer_cuda_graph", False, "the optimizer step reads the gradient norm on the host"),
    ("cpu_offloading_num_layers", 0, _OFFLOADING),
    ("fine_grained_activation_offloading", False, _OFFLOADING),
    ("moe_paged_stash", False, _OFFLOADING),
    ("overlap_moe_expert_parallel_comm", False, "it splits the layers; not tested"),
    ("moe_use_upcycling", False, "train the MoE model from its own initial weights"),
    ("moe_latent_size", None, "not tested"),
    ("moe_single_grouped_weight", False, _LAYOUT),
    ("moe_single_grouped_bias", False, _LAYOUT),
    ("logits_save_dir", None, "megasink's forward step does not return logits"),
    ("logits_load_dir", None, "distillation is not supported"),
    # megatron/training/training.py:4365,4382: a test set, or a single validation set, stops it.
    ("full_validation", False, "it fails in Megatron; use --eval-iters"),
    ("multiple_validation_sets", False, "it needs --full-validation, which fails in Megatron"),
    ("perform_rl_step", False, "pre-training only"),
    ("freeze_all_layers", False, "not supported"),
    ("init_model_with_meta_device", False, "not supported"),
    ("flash_decode", False, "it bypasses core attention and its window"),
    ("enable_ft_package", False, "Megatron's calls do not fit the released package: use torchrun"),
    ("inprocess_restart", False, "it wraps Megatron's own script: use torchrun's --max-restarts"),
    ("spec", None, "megasink provides the layer spec"),
)


def problems(args: Namespace) -> Iterator[str]:
    for name, fine, advice in _UNSUPPORTED:
        if getattr(args, name, fine) not in (fine, None):
            yield f"{_FLAGS.get(name) or flag_of(name)}: {advice}"
