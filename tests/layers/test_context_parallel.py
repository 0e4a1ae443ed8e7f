"""Attention over context-parallel ranks against the definition over the whole sequence."""

import numpy as np
import pytest
import torch

from megasink.attention import VARIANTS, reference_attention
from megasink.layers.context_parallel import in_rank_order, in_sequence_order
from tests.attention.attention_oracle import assert_at_most_twice_plain_error, evaluate
from tests.distributed.layout import Layout
from tests.layers.context_case import case_of

CASES = [
    (kind, variant, dtype, sink, window)
    for kind in ("all_gather", "a2a")
    for variant in VARIANTS
    for dtype in ("float32", "bfloat16")
    for sink, window in ((5.0, None), (3.0, 5), (-4.0, 16))
]


@pytest.fixture(scope="module")
def found(pool):
    """{case: results by rank}."""
    task = "tests.layers.context_tasks:attend_over_ranks"
    by_rank = pool.run(task, Layout(cp=2), cases=CASES)
    return dict(zip(CASES, zip(*by_rank, strict=True), strict=True))


def in_order(name: str, parts: tuple[np.ndarray, ...]) -> torch.Tensor:
    """The whole tensor: a sink's gradient is a sum, tokens are chunks 0, 3 and 1, 2."""
    if name == "d sink":
        return torch.from_numpy(sum(parts))
    (first, last), (second, third) = (np.split(part, 2, axis=2) for part in parts)
    return torch.from_numpy(np.concatenate((first, second, third, last), axis=2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_ranks_together_equal_the_definition(found, case):
    _, variant, name, sink, window = case
    dtype = getattr(torch, name)
    results = found[case]
    ours = {key: in_order(key, tuple(r[key] for r in results)) for key in results[0]}
    whole = case_of(dtype, sink)
    plain, exact = (
        evaluate(reference_attention, whole, precision, variant, window=window)
        for precision in (dtype, torch.float64)
    )
    for outputs in (plain, exact):
        del outputs["lse"]
    assert_at_most_twice_plain_error(ours, plain, exact, dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_order_of_the_sequence_and_that_of_the_ranks(ranks):
    """Rank r holds the chunks r and 2 cp - 1 - r (megatron/core/utils.py:2740)."""
    tokens = torch.arange(2 * ranks * 3)
    chunks = tokens.chunk(2 * ranks)
    ranked = torch.cat([torch.cat((chunks[r], chunks[-1 - r])) for r in range(ranks)])
    assert torch.equal(in_rank_order(tokens, ranks), ranked)
    assert torch.equal(in_sequence_order(ranked, ranks), tokens)
