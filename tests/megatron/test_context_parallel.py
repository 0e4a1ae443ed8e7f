"""Attention over context-parallel ranks against the definition over the whole sequence."""

import numpy as np
import pytest
import torch

from megasink.attention import VARIANTS, reference_attention
from megasink.megatron.context_parallel import in_rank_order, in_sequence_order, own_chunks
from tests.attention.attention_oracle import assert_at_most_twice_plain_error, evaluate
from tests.distributed.layout import Layout
from tests.megatron.context_case import case_of

CASES = [
    (kind, variant, dtype, sink, window)
    for kind in ("all_gather", "a2a")
    for variant in VARIANTS
    for dtype in ("float32", "bfloat16")
    for sink, window in ((5.0, None), (3.0, 5), (-4.0, 16))
]
RING = [
    ("p2p", variant, dtype, sink, None)
    for variant in VARIANTS
    for dtype in ("float32", "bfloat16")
    for sink in (5.0, -4.0)
]
CASES += RING
# Ends of documents in 28 tokens, of which each rank has two chunks of 7: one document over all
# chunks, ends at those of the chunks, a token by itself, on both sides of a cut too.
ENDS = {
    "one": (28,),
    "at the cuts": (7, 14, 21, 28),
    "odd": (5, 6, 19, 28),
    "around a cut": (6, 7, 8, 20, 22, 28),
    "of two tokens": tuple(range(2, 29, 2)),
    "of three tokens and one": (*range(3, 28, 3), 28),
}
PACKED = [
    (kind, variant, dtype, 3.0, window, ends)
    for kind in ("all_gather", "a2a")
    for variant in VARIANTS
    for dtype, window in (("float32", None), ("float32", 4), ("bfloat16", None))
    for ends in ENDS
]


@pytest.fixture(scope="module")
def found(pool):
    """{case: results by rank}."""
    task = "tests.megatron.context_tasks:attend_over_ranks"
    cases = [*((*case, None) for case in CASES), *((*case[:-1], ENDS[case[-1]]) for case in PACKED)]
    by_rank = pool.run(task, Layout(cp=2), cases=cases)
    return dict(zip([*CASES, *PACKED], zip(*by_rank, strict=True), strict=True))


def in_order(name: str, parts: tuple[np.ndarray, ...]) -> torch.Tensor:
    """The whole tensor: a sink's gradient is a sum, tokens are chunks r and 2 cp - 1 - r."""
    if name == "d sink":
        return torch.from_numpy(sum(parts))
    firsts, lasts = zip(*(np.split(part, 2, axis=2) for part in parts), strict=True)
    return torch.from_numpy(np.concatenate((*firsts, *lasts[::-1]), axis=2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_ranks_together_equal_the_definition(found, case):
    equal_the_definition(case, found[case])


@pytest.fixture(scope="module")
def of_four(four):
    """{case: results by rank} of four ranks, whose keys pass earlier and later ranks."""
    task = "tests.megatron.context_tasks:attend_over_ranks"
    by_rank = four.run(task, Layout(cp=4), cases=[(*case, None) for case in RING])
    return dict(zip(RING, zip(*by_rank, strict=True), strict=True))


@pytest.mark.parametrize("case", RING, ids=lambda case: "-".join(map(str, case)))
def test_a_ring_of_four_equals_the_definition(of_four, case):
    equal_the_definition(case, of_four[case])


def equal_the_definition(case, results):
    _, variant, name, sink, window = case
    dtype = getattr(torch, name)
    ours = {key: in_order(key, tuple(r[key] for r in results)) for key in results[0]}
    whole = case_of(dtype, sink, len(results))
    plain, exact = (
        evaluate(reference_attention, whole, precision, variant, window=window)
        for precision in (dtype, torch.float64)
    )
    for outputs in (plain, exact):
        del outputs["lse"]
    assert_at_most_twice_plain_error(ours, plain, exact, dtype)


@pytest.mark.parametrize("case", PACKED, ids=lambda case: "-".join(map(str, case)))
def test_packed_documents_equal_the_definition(found, case):
    _, variant, name, sink, window, ends = case
    dtype = getattr(torch, name)
    results = found[case]
    ours = {key: in_order(key, tuple(r[key] for r in results)) for key in results[0]}
    whole, mask = case_of(dtype, sink), {"window": window, "cu_seqlens": (0, *ENDS[ends])}
    plain, exact = (
        evaluate(reference_attention, whole, precision, variant, **mask)
        for precision in (dtype, torch.float64)
    )
    for outputs in (plain, exact):
        del outputs["lse"]
    # Documents of one token: see the oracle on roundings.
    assert_at_most_twice_plain_error(ours, plain, exact, dtype, roundings=4)


def test_ranks_keep_their_share_of_what_one_keeps(four):
    """Keys and values of the sequence are gathered again in the backward pass."""
    tokens, task = 512, "tests.megatron.context_tasks:saved_bytes"
    alone, *shares = (four.run(task, Layout(cp=ranks), tokens=tokens) for ranks in (1, 2, 4))
    for ranks, found in zip((2, 4), shares, strict=True):
        for rank in found:
            assert rank["bytes"] <= 1.05 * alone[0]["bytes"] / ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_order_of_the_sequence_and_that_of_the_ranks(ranks):
    """Rank r holds the chunks r and 2 cp - 1 - r (megatron/core/utils.py:2740)."""
    tokens = torch.arange(2 * ranks * 3)
    chunks = tokens.chunk(2 * ranks)
    ranked = torch.cat([torch.cat((chunks[r], chunks[-1 - r])) for r in range(ranks)])
    assert torch.equal(in_rank_order(tokens, ranks), ranked)
    assert torch.equal(in_sequence_order(ranked, ranks), tokens)
    own = [own_chunks(tokens[None], ranks, rank, dim=1)[0] for rank in range(ranks)]
    assert torch.equal(torch.cat(own), ranked)
