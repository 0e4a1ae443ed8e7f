"""Options of Megatron that megasink refuses, with the reason."""

from argparse import Namespace
from typing import Any

# Options of Megatron that change attention, the loss or the weights in ways that are not covered
# by a test here: (attribute, value that is fine, flag, what to do).
_UNSUPPORTED: tuple[tuple[str, Any, str, str], ...] = (
    ("multi_latent_attention", False, "--multi-latent-attention", "MLA has no sink here"),
    ("num_experts", None, "--num-experts", "MoE layers are not supported yet"),
    ("mtp_num_layers", None, "--mtp-num-layers", "its blocks ignore the layer spec"),
    ("context_parallel_size", 1, "--context-parallel-size", "not supported yet: use 1"),
    ("attention_output_gate", False, "--attention-output-gate", "not supported yet"),
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
    ("use_torch_fsdp2", False, "--use-torch-fsdp2", "use the distributed optimizer"),
    ("use_megatron_fsdp", False, "--use-megatron-fsdp", "use the distributed optimizer"),
    ("cuda_graph_impl", "none", "--cuda-graph-impl", "not supported yet"),
    ("init_model_with_meta_device", False, "--init-model-with-meta-device", "not supported"),
    ("spec", None, "--spec", "megasink brings its own layer spec"),
    ("yaml_cfg", None, "--yaml-cfg", "give flags instead"),
)


def problems(args: Namespace) -> list[str]:
    """A sentence for each."""
    return [
        f"{flag}: {advice}"
        for name, fine, flag, advice in _UNSUPPORTED
        if getattr(args, name, fine) not in (fine, None)
    ]
