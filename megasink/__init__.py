"""Attention heads gated by an attention sink or a sigmoid gate, on Megatron-Core."""

__version__ = "0.1.0"
