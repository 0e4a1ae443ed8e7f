"""Generating tokens from a trained model."""
