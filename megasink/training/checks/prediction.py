"""Checks of multi-token prediction (--mtp-num-layers)."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.flags import flag_of

# What its layers would ignore, or what no test covers: (attribute, default, what to do).
_WITHOUT = (
    ("hybrid_layer_pattern", None, "GPT models only"),
    ("dataloader_inter_document_masking", False, "it would predict across documents"),
    ("context_parallel_size", 1, "its loss is a mean over each rank's targets, which differ"),
    ("pipeline_model_parallel_layout", None, "its layers are on the last stage"),
    ("lora_rank", 0, "adapters of its layers are not supported"),
    ("post_norm", False, "its layers end in a norm of their own"),
    ("norm_without_gain", False, "its norms have gains"),
    ("embedding_norm", False, "it reads the embeddings on the last stage"),
    ("sinusoidal_position_embedding", False, "it reads the embeddings on the last stage"),
)


def problems(args: Namespace) -> Iterator[str]:
    if not args.mtp_num_layers:
        return
    stages = args.pipeline_model_parallel_size
    if stages > 1 and not args.untie_embeddings_and_output_weights:
        yield (
            f"--mtp-num-layers with --pipeline-model-parallel-size {stages} and one weight for "
            "embedding and output layer: Megatron cannot save it: add "
            "--untie-embeddings-and-output-weights"
        )
    for name, default, why in _WITHOUT:
        if getattr(args, name) not in (default, None):
            yield f"--mtp-num-layers with {flag_of(name)}: {why}: drop one of the two"
