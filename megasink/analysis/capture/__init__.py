"""Statistics of attention heads and hidden states, captured while a model runs."""
