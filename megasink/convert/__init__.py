"""Megatron checkpoints <-> Hugging Face folders: one table of weights for both directions."""
