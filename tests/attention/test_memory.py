"""Nothing of attention is tokens x tokens, by what PyTorch's allocator hands out."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megasink.attention import (
    attention,
    reference_attention,
    reference_similarity_attention,
    similarity_attention,
)

TOKENS = 4096
MASK, FLOAT = TOKENS**2, 4 * TOKENS**2
"""Bytes of a mask and of a float32 tensor that are tokens x tokens."""


def largest(function, **options):
    """The bytes of the largest allocation of a forward and backward, also inside of a kernel.

    The resident set of a process would also hold what malloc keeps of freed memory.
    """
    tensors = [torch.randn(1, 1, TOKENS, 8).requires_grad_() for _ in range(3)]
    for name, shape in (("sink_H", (1,)), ("distance_bias_HS", (1, TOKENS))):
        if name in options:
            options[name] = torch.zeros(shape, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        outputs = function(*tensors, **options)
        sum(output.sum() for output in outputs if output.requires_grad).backward()
    events = record.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


SINK = {"variant": "sink", "sink_H": None}


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (attention, {"backend": "flash-cpu"}),
        (attention, SINK | {"backend": "flash-cpu", "window": 1500}),
        (attention, SINK | {"backend": "eager"}),
        (attention, {"distance_bias_HS": None}),
        (similarity_attention, {"similarity": "sigmoid"}),
        (similarity_attention, {"similarity": "elu-plus-one", "window": 1500}),
        (similarity_attention, {"similarity": "identity"}),
    ],
)
def test_nothing_is_tokens_by_tokens(function, options):
    """A chunk of 256 rows has 8 MiB where positions are int64; a mask has 16."""
    assert largest(function, **options) < MASK


@pytest.mark.parametrize(
    ("function", "options"),
    [(reference_attention, SINK), (reference_similarity_attention, {"similarity": "sigmoid"})],
)
def test_the_definitions_would_be_seen(function, options):
    assert largest(function, **options) >= FLOAT
