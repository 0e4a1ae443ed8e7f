"""Heads switched off, and what the model loses."""
