"""Megatron's --hybrid-layer-pattern, read without importing Megatron.

One symbol per layer: ``*`` attention, ``-`` FFN, ``E`` experts, ``M`` Mamba, ``G`` gated delta net,
``D`` and ``+`` latent attention. ``|`` separates pipeline stages, and ``/`` precedes the layers of
multi-token prediction (megatron/core/models/hybrid/hybrid_layer_allocation.py:Symbols).
"""

ATTENTION, FFN, EXPERTS, MAMBA, DELTA_NET = "*", "-", "E", "M", "G"
LATENT = "D+"
SUPPORTED = ATTENTION + FFN + EXPERTS + MAMBA + DELTA_NET
RECURRENT = {MAMBA: "Mamba", DELTA_NET: "gated delta-net"}
"""Layers whose state runs through the whole row."""
STAGE, PREDICTION = "|", "/"


def layers_of(pattern: str) -> str:
    """Return one symbol per layer: the pattern without the boundaries of pipeline stages."""
    return pattern.partition(PREDICTION)[0].replace(STAGE, "")
