"""The head-balance loss of P0: loss, gradient, reductions over ranks and statistics."""
