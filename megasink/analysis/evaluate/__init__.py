"""Tasks of lm-eval on models whose heads are changed."""
