"""Attention with exact gradients through its log-sum-exp and gates. Depends only on torch."""

from megasink.attention.backends import (
    AttentionRequest,
    Backend,
    Choice,
    backend_names,
    choose_backend,
    register_backend,
)
from megasink.attention.biases import biased_attention
from megasink.attention.call import VARIANTS, AttentionCall, BackwardTensors, Gradients
from megasink.attention.explicit_gate import (
    apply_gate,
    gate_values,
    head_rms_norm,
    mean_over_heads,
)
from megasink.attention.functional import attention, slot_attention
from megasink.attention.gate_derivatives import gate_bias_gradient, gate_slope
from megasink.attention.gate_kernels import choose_gate_kernels
from megasink.attention.lse_statistics import first_key_gate, first_key_share, gate_sum
from megasink.attention.reference import (
    SIMILARITIES,
    AttentionOutput,
    reference_attention,
    reference_biased_attention,
    reference_gate,
    reference_head_norm,
    reference_similarity_attention,
    reference_slot_attention,
)
from megasink.attention.similarity import (
    SimilarityOutput,
    feature_map,
    first_key_weight,
    similarity_attention,
)

__all__ = [
    "SIMILARITIES",
    "VARIANTS",
    "AttentionCall",
    "AttentionOutput",
    "AttentionRequest",
    "Backend",
    "BackwardTensors",
    "Choice",
    "Gradients",
    "SimilarityOutput",
    "apply_gate",
    "attention",
    "backend_names",
    "biased_attention",
    "choose_backend",
    "choose_gate_kernels",
    "feature_map",
    "first_key_gate",
    "first_key_share",
    "first_key_weight",
    "gate_bias_gradient",
    "gate_slope",
    "gate_sum",
    "gate_values",
    "head_rms_norm",
    "mean_over_heads",
    "reference_attention",
    "reference_biased_attention",
    "reference_gate",
    "reference_head_norm",
    "reference_similarity_attention",
    "reference_slot_attention",
    "register_backend",
    "similarity_attention",
    "slot_attention",
]
