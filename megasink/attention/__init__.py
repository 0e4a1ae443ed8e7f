"""Attention with exact gradients through its log-sum-exp and gates. Depends only on torch.

Names are imported when they are first used: options and flags are read before torch is loaded, and
name the variants.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megasink.attention.call import (
        VARIANTS,
        AttentionCall,
        AttentionOutput,
        BackwardTensors,
        Gradients,
    )
    from megasink.attention.explicit_gate import (
        apply_gate,
        gate_values,
        head_rms_norm,
        mean_over_heads,
    )
    from megasink.attention.functional import attention, slot_attention
    from megasink.attention.gate_derivatives import gate_bias_gradient, gate_slope
    from megasink.attention.gate_kernels import choose_gate_kernels
    from megasink.attention.kernels import (
        AttentionRequest,
        Backend,
        Choice,
        backend_names,
        choose_backend,
        register_backend,
    )
    from megasink.attention.key_value_biases import biased_attention
    from megasink.attention.layout import gate_sum
    from megasink.attention.lse_statistics import first_key_gate, first_key_share
    from megasink.attention.reference import (
        SIMILARITIES,
        reference_attention,
        reference_biased_attention,
        reference_gate,
        reference_head_norm,
        reference_similarity_attention,
        reference_slot_attention,
        reference_switch,
    )
    from megasink.attention.similarity import (
        SimilarityOutput,
        feature_map,
        similarity_attention,
    )

__all__ = ["SIMILARITIES", "VARIANTS", "AttentionCall", "AttentionOutput", "AttentionRequest"]
__all__ += ["Backend", "BackwardTensors", "Choice", "Gradients", "SimilarityOutput", "apply_gate"]
__all__ += ["attention", "backend_names", "biased_attention", "choose_backend"]
__all__ += ["choose_gate_kernels", "feature_map", "first_key_gate", "first_key_share"]
__all__ += ["gate_bias_gradient", "gate_slope", "gate_sum", "gate_values", "head_rms_norm"]
__all__ += ["mean_over_heads", "reference_attention", "reference_biased_attention"]
__all__ += ["reference_gate", "reference_head_norm", "reference_similarity_attention"]
__all__ += ["reference_slot_attention", "reference_switch", "register_backend"]
__all__ += ["similarity_attention", "slot_attention"]

# {module: what is imported from it when it is first used}
_MODULES: dict[str, tuple[str, ...]] = {
    "call": ("VARIANTS", "AttentionCall", "AttentionOutput", "BackwardTensors", "Gradients"),
    "functional": ("attention", "slot_attention"),
    "gate_kernels": ("choose_gate_kernels",),
    "kernels": (
        *("AttentionRequest", "Backend", "Choice", "backend_names", "choose_backend"),
        "register_backend",
    ),
    "layout": ("gate_sum",),
    "lse_statistics": ("first_key_gate", "first_key_share"),
    "key_value_biases": ("biased_attention",),
    "explicit_gate": ("apply_gate", "gate_values", "head_rms_norm", "mean_over_heads"),
    "gate_derivatives": ("gate_bias_gradient", "gate_slope"),
    "reference": ("SIMILARITIES", *(name for name in __all__ if name.startswith("reference_"))),
    "similarity": ("SimilarityOutput", "feature_map", "similarity_attention"),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _MODULES.items():
        if name in names:
            value = getattr(importlib.import_module(f"megasink.attention.{module}"), name)
            return globals().setdefault(name, value)
    raise AttributeError(f"module 'megasink.attention' has no attribute {name!r}")
