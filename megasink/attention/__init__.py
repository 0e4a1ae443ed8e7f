"""Attention with exact gradients through its log-sum-exp and gates. Needs torch alone."""

from megasink.attention.backends import (
    AttentionRequest,
    Backend,
    Choice,
    backend_names,
    choose_backend,
    register_backend,
)
from megasink.attention.functional import attention, slot_attention
from megasink.attention.gates import first_key_gate, gate_sum
from megasink.attention.reference import (
    VARIANTS,
    AttentionOutput,
    reference_attention,
    reference_slot_attention,
)

__all__ = [
    "VARIANTS",
    "AttentionOutput",
    "AttentionRequest",
    "Backend",
    "Choice",
    "attention",
    "backend_names",
    "choose_backend",
    "first_key_gate",
    "gate_sum",
    "reference_attention",
    "reference_slot_attention",
    "register_backend",
    "slot_attention",
]
