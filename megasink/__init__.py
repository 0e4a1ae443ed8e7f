"""Attention heads gated by the attention sink or by a sigmoid gate, on Megatron-Core."""

__version__ = "0.1.0"
