"""Checks of multi-token prediction (--mtp-num-layers)."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.megatron_flags import refused


def problems(args: Namespace) -> Iterator[str]:
    if not args.mtp_num_layers:
        return
    if (kind := args.position_embedding_type) not in ("rope", "none"):
        yield (f"--mtp-num-layers with --position-embedding-type {kind}: use rope or none")
    stages = args.pipeline_model_parallel_size
    if stages > 1 and not args.untie_embeddings_and_output_weights:
        yield (
            f"--mtp-num-layers with --pipeline-model-parallel-size {stages} and one weight for "
            "embedding and output layer: Megatron cannot save it: add "
            "--untie-embeddings-and-output-weights"
        )
    for flag, _, why in refused(args, "mtp_num_layers"):
        yield f"--mtp-num-layers with {flag}: {why}: drop one of the two"
