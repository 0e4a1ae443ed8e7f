"""YaRN on a run that was trained without it."""

from collections.abc import Mapping
from typing import Any

from megasink.errors import UserError


def with_yarn(saved: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return the arguments of a run whose context YaRN stretches, without training (P1.37).

    The original context is the sequence length that the run was trained with; its other settings
    are Megatron's defaults, those of the YaRN paper (beta 32 and 1, and its temperature).

    Args:
        saved: of `read_arguments`.
        factor: new context over old, more than 1.

    Raises:
        UserError: the run has no rotary embedding, or has one that is stretched already.
    """
    kind = saved.get("position_embedding_type")
    if kind != "rope" or saved.get("use_rope_scaling"):
        found = "--use-rope-scaling" if kind == "rope" else f"--position-embedding-type {kind}"
        raise UserError(
            f"--yarn {factor:g}: the run has {found}; YaRN stretches plain rotary embeddings (rope)"
        )
    trained = saved["seq_length"]
    return {
        **saved,
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": trained,
        "max_position_embeddings": max(round(factor * trained), saved["max_position_embeddings"]),
    }
