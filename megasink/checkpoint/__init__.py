"""Checkpoints from outside the training loop: which one, is it whole, what is in it, load it."""
