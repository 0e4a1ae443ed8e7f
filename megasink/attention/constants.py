"""Constants shared by several packages. Imports nothing, so any package may import it."""

SINK_EPSILON = 0.3
"""A head has a sink on a key whose mean weight is strictly greater than this (P2.2)."""

SINK_TOKENS = 64
"""Sequence length at which training counts sinks, as in P2. It is fixed because the mean weight on
the first key decreases with the length."""

MAP_TOKENS = 256
"""Maximum sequence length for attention maps, the only S x S statistic."""

SHARES = (0.0, 0.05, 0.10, 0.15, 0.20, 0.25, 0.30)
"""Shares of inactive heads for which P3 calibrates thresholds (P3.11)."""

BACKWARD_SCORES = ("gradient", "gradient_signed")
"""Scores that need a backward pass (`--metrics`)."""

SCORES = (
    *("awft", "aeqd", "ftvvn", "avvn", "lthon", "ahon", "circuit_ahon"),
    *("awft_ln", "aeqd_ln", "ftvvn_ln", "avvn_ln", "lthon_ln", "ahon_ln", "circuit_ahon_ln"),
    *("lthon_hn", "random", *BACKWARD_SCORES),
)
"""Names of the scores that find inactive heads (P3.1 to P3.10), to check a command line."""

PROXY_EPSILON = 1e-8
"""P2's code adds this to a sum of weights that may be 0 (P2.37)."""
