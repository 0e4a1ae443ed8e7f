"""Numbers that several rooms must agree on. Imports nothing, so that every room may import it."""

SINK_EPSILON = 0.3
"""A head has a sink on a key whose mean weight exceeds this (P2.2): strict."""

SINK_TOKENS = 64
"""Tokens of the sequences that sinks are counted on in training: P2's length. One for all, since
the mean weight on the first key falls with the length."""

PROXY_EPSILON = 1e-8
"""What the code of P2 adds to a sum of weights that may be 0 (P2.37)."""
