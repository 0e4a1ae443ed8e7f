"""The next token: greedy, temperature, top-k, top-p, and rows that are no token."""

import pytest
import torch

from megasink.megatron.sampling import Sampling, next_tokens

PROBABILITY = torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1])
DRAWS = 20_000


def frequencies(**options) -> torch.Tensor:
    """How often each of five tokens is drawn; a sixth row, the most likely one, is no token."""
    logits = torch.cat([PROBABILITY.log(), torch.tensor([9.0])]).expand(DRAWS, -1)
    generator = torch.Generator().manual_seed(3)
    tokens = next_tokens(logits, Sampling(**options), generator, vocabulary=5)
    return torch.bincount(tokens, minlength=6) / DRAWS


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0.0}, [0, 1, 0, 0, 0, 0]),
        ({}, [0.05, 0.4, 0.25, 0.2, 0.1, 0]),
        ({"top_k": 1, "temperature": 5.0}, [0, 1, 0, 0, 0, 0]),
        ({"top_k": 2}, [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0, 0]),
        ({"top_k": 99}, [0.05, 0.4, 0.25, 0.2, 0.1, 0]),
        ({"top_p": 0.3}, [0, 1, 0, 0, 0, 0]),
        ({"top_p": 0.7}, [0, 0.4 / 0.85, 0.25 / 0.85, 0.2 / 0.85, 0, 0]),
        # Of the two that top-k leaves, with 0.615 and 0.385, the first one reaches p.
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0, 0, 0]),
        ({"temperature": 0.5}, [0.0025, 0.16, 0.0625, 0.04, 0.01, 0]),
    ],
)
def test_frequencies(options, expected):
    expected = torch.tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(
        frequencies(**options), expected / expected.sum(), rtol=0, atol=0.015
    )


def test_the_seed_decides_the_draw():
    logits = PROBABILITY.log().expand(50, -1)
    first, again, other = (
        next_tokens(logits, Sampling(), torch.Generator().manual_seed(seed), 5).tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other
