"""The inputs of metrics: statistics of one sequence, and facts of the samples."""

ATTENTION: dict[str, str] = {
    "query_HTD": "queries as attention sees them: after rotary embeddings and query norms",
    "key_GTD": "keys as attention sees them, per key/value group",
    "value_GTD": "values, per key/value group",
    "out_HTD": "A V of each head, before an explicit gate and the output projection",
    "gated_out_HTD": "input of the output projection: out_HTD without a gate",
    "output_weight_HDE": "the output projection, by query head",
    "explicit_gate_HTX": "scores of an explicit gate after its activation; X is 1 or D",
    "gate_HT": "G: 1 - weight of the first token, or of the sink where one is; the explicit gate",
    "first_weight_HT": "A_i0, the weight of the first token",
    "slot_weight_HT": "weight of the sink or bias; 0 without one",
    "entropy_HT": "nats; a sink is one more outcome",
    "square_HT": "sum over keys of A_ij ** 2",
    "column_sum_HT": "for each key j the sum over the queries i >= j of A_ij",
}
"""Statistics of one sequence in one attention layer, after padding is removed.

For non-softmax weights, the weight statistics are the proxies of P2.37.
"""

STATE = {"state_TE": "x_0 the embedding, x_(l + 1/2) after attention, x_(l + 1) block l's output"}
"""Statistics of one sequence in one state of the residual stream."""

BRANCHES = {
    "attention_branch_TE": "output of attention, before any norm of it",
    "mlp_branch_TE": "output of the MLP, before any norm of it",
}
"""Statistics of one sequence in one block."""

GRADIENT = {
    "mask_gradient_H": "derivative of the sequence's mean loss (nats) by a factor of each head's "
    "output, at 1; takes a backward pass"
}
"""Statistics of one sequence in one attention layer that only `--metrics` asks for."""

STATISTICS: dict[str, str] = {**ATTENTION, **STATE, **BRANCHES, **GRADIENT}
"""Statistics that a metric may take, by parameter name; all from one table, or one branch.

Shapes: H query heads, G key/value groups, T tokens of the sequence, D head dim, E hidden size.
Floating point, at least float32.
"""

TOGETHER = (set(ATTENTION), set(STATE), *({name} for name in (*BRANCHES, *GRADIENT)))
"""Statistics that one metric may take together."""

FACTS: dict[str, str] = {
    "tokens_N": "tokens of each sample",
    "nats_N": "summed loss of each sample's targets",
    "targets_N": "tokens of each sample that are predicted",
    "bytes_N": "bytes of text that the targets stand for; tokenizers without text have none",
    "nats_of_bytes_N": "summed loss of the targets that stand for bytes",
    "cosine_SP": "mean cosine between the states of different samples (P4.5); of all samples only",
    "seed": "of the analysis, an int",
}
"""Facts that a derived metric may take. A metric whose fact is unknown is left out."""
