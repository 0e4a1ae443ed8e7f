"""The head-balance loss of P0: its maths, its process groups, its gradient, its series."""
