"""Sizes of the model whose collectives are counted, for tests that import no torch."""

LAYERS, HEADS, MICROBATCHES = 4, 4, 4
