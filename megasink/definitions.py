"""Constants shared by several packages. Imports nothing, so any package may import it."""

SINK_EPSILON = 0.3
"""A head has a sink on a key whose mean weight is strictly greater than this (P2.2)."""

SINK_TOKENS = 64
"""Sequence length on which training counts sinks, as in P2. It is fixed because the mean weight on
the first key decreases with the length."""

PROXY_EPSILON = 1e-8
"""Added by P2's code to a sum of weights that may be 0 (P2.37)."""
