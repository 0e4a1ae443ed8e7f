"""Options of Megatron that megasink refuses, with the reason."""

from argparse import Namespace
from typing import Any

_GRAPHS = "the statistics of the heads are gathered outside of a graph"
_OFFLOADING = "use --recompute-granularity to save memory"
_GROUPED = "experts in one tensor start from weights that depend on the layout"

# Options of Megatron that change attention, the loss or the weights in ways that are not covered
# by a test here: (attribute, value that is fine, flag, what to do).
_UNSUPPORTED: tuple[tuple[str, Any, str, str], ...] = (
    ("multi_latent_attention", False, "--multi-latent-attention", "MLA has no sink here"),
    ("mtp_num_layers", None, "--mtp-num-layers", "its blocks ignore the layer spec"),
    ("hybrid_layer_pattern", None, "--hybrid-layer-pattern", "GPT models only"),
    ("heterogeneous_layers_config_path", None, "--heterogeneous-layers-config-path", "GPT only"),
    ("experimental_attention_variant", None, "--experimental-attention-variant", "GPT only"),
    (
        "reset_attention_mask",
        False,
        "--reset-attention-mask",
        "it makes S x S masks: use --dataloader-inter-document-masking",
    ),
    ("sft", False, "--sft", "packed batches are not supported"),
    ("fim_data", False, "--fim-data", "not supported"),
    ("apply_query_key_layer_scaling", False, "--apply-query-key-layer-scaling", "not supported"),
    ("qk_clip", False, "--qk-clip", "the kernels do not return the maximum logit"),
    ("log_max_attention_logit", False, "--log-max-attention-logit", "kernels do not return it"),
    (
        "apply_residual_connection_post_layernorm",
        False,
        "--apply-residual-connection-post-layernorm",
        "Megatron's layers do not read it: use --post-norm or --sandwich-norm",
    ),
    ("use_flash_attn", False, "--use-flash-attn", "use --attention-kernel"),
    ("flash_attention_version", None, "--flash-attention-version", "use --attention-kernel"),
    ("fp8", None, "--fp8-format", "no FP8 kernel returns the log-sum-exp: use --bf16"),
    ("fp4", None, "--fp4-format", "no FP4 kernel returns the log-sum-exp: use --bf16"),
    ("use_kitchen_attention", False, "--use-kitchen-attention", "use --attention-kernel"),
    ("batch_invariant_mode", False, "--batch-invariant-mode", "it replaces Megatron's kernels"),
    ("use_torch_fsdp2", False, "--use-torch-fsdp2", "use --use-distributed-optimizer"),
    ("use_megatron_fsdp", False, "--use-megatron-fsdp", "use --use-distributed-optimizer"),
    *(
        (name, 1, f"--{name.replace('_', '-')}", "initial weights would depend on the shards")
        for name in (
            "tensor_parallel_num_weight_shards",
            "expert_tensor_parallel_num_weight_shards",
        )
    ),
    ("data_parallel_random_init", False, "--data-parallel-random-init", "replicas start equal"),
    ("cuda_graph_impl", "none", "--cuda-graph-impl", _GRAPHS),
    ("enable_cuda_graph", False, "--enable-cuda-graph", _GRAPHS),
    ("external_cuda_graph", False, "--external-cuda-graph", _GRAPHS),
    ("optimizer_cuda_graph", False, "--optimizer-cuda-graph", _GRAPHS),
    ("cpu_offloading_num_layers", 0, "--cpu-offloading-num-layers", _OFFLOADING),
    (
        "fine_grained_activation_offloading",
        False,
        "--fine-grained-activation-offloading",
        _OFFLOADING,
    ),
    ("moe_paged_stash", False, "--moe-paged-stash", _OFFLOADING),
    (
        "overlap_moe_expert_parallel_comm",
        False,
        "--overlap-moe-expert-parallel-comm",
        "it takes the layers apart; not tested",
    ),
    ("moe_use_upcycling", False, "--moe-use-upcycling", "train the MoE model from its own weights"),
    ("moe_latent_size", None, "--moe-latent-size", "not tested"),
    ("moe_single_grouped_weight", False, "--moe-single-grouped-weight", _GROUPED),
    ("moe_single_grouped_bias", False, "--moe-single-grouped-bias", _GROUPED),
    ("logits_save_dir", None, "--logits-save-dir", "the forward step of megasink has no logits"),
    ("logits_load_dir", None, "--logits-load-dir", "the forward step does not distil"),
    # megatron/training/training.py:4365,4382: the test part, or a single validation part, ends it.
    (
        "full_validation",
        False,
        "--full-validation",
        "Megatron's ends in an error; use --eval-iters",
    ),
    (
        "multiple_validation_sets",
        False,
        "--multiple-validation-sets",
        "Megatron has it with --full-validation alone",
    ),
    ("perform_rl_step", False, "--perform-rl-step", "pre-training only"),
    ("freeze_all_layers", False, "--freeze-all-layers", "not supported"),
    ("init_model_with_meta_device", False, "--init-model-with-meta-device", "not supported"),
    ("flash_decode", False, "--flash-decode", "it passes by core attention and its window"),
    ("spec", None, "--spec", "megasink brings its own layer spec"),
)


def problems(args: Namespace) -> list[str]:
    """A sentence for each."""
    return [
        f"{flag}: {advice}"
        for name, fine, flag, advice in _UNSUPPORTED
        if getattr(args, name, fine) not in (fine, None)
    ]
