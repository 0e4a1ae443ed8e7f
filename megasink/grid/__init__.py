"""Grids: a file of configurations and seeds -> runs, a table and figures."""
