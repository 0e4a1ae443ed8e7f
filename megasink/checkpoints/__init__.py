"""Find, verify, inspect and load checkpoints outside the training loop."""
