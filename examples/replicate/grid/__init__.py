"""``python -m examples.replicate.grid``: a file of configurations and seeds -> runs, a table."""
