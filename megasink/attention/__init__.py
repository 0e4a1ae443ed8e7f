"""Attention with exact gradients through its log-sum-exp and gates. Needs torch alone."""

from megasink.attention.backends import (
    AttentionRequest,
    Backend,
    Choice,
    backend_names,
    choose_backend,
    register_backend,
)
from megasink.attention.explicit_gate import (
    apply_gate,
    gate_values,
    head_rms_norm,
    mean_over_heads,
)
from megasink.attention.functional import attention, slot_attention
from megasink.attention.gates import first_key_gate, gate_sum
from megasink.attention.reference import (
    VARIANTS,
    AttentionOutput,
    reference_attention,
    reference_gate,
    reference_head_norm,
    reference_slot_attention,
)

__all__ = [
    "VARIANTS",
    "AttentionOutput",
    "AttentionRequest",
    "Backend",
    "Choice",
    "apply_gate",
    "attention",
    "backend_names",
    "choose_backend",
    "first_key_gate",
    "gate_sum",
    "gate_values",
    "head_rms_norm",
    "mean_over_heads",
    "reference_attention",
    "reference_gate",
    "reference_head_norm",
    "reference_slot_attention",
    "register_backend",
    "slot_attention",
]
