"""Shuffle Megatron's text data independently of the run's length.

Upstream shuffles the documents and samples of all epochs together, except a last epoch with few
requested samples. More steps would change the order of every epoch: a resumed run would repeat some
samples of its current epoch and miss others. Here each epoch is shuffled separately. The first has
Megatron's order.

Shapes: N samples, of all epochs or of one.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import numpy as np

from megasink.upstream.patch_register import patches

_BUILD = ":GPTDataset._build_document_sample_shuffle_indices"
ORDER = patches("always", "tests/training/test_sample_order.py")(
    "an order for each epoch",
    "megatron.core.datasets.gpt_dataset",
    "_build_document_index _build_shuffle_index",
    "raising the number of steps would change the order of the epoch in which a run resumes",
    "def _build_document_index(documents, num_epochs, numpy_random_state, separate_final_epoch)",
    "def _build_shuffle_index(num_samples, total_size, numpy_random_state)",
    f"{_BUILD}: _build_document_index(self.indices, num_epochs, numpy_random_state, "
    "separate_final_epoch)",
    f"{_BUILD}: numpy_random_state = numpy.random.RandomState(self.config.random_seed)",
)
# Datasets of a blend are built in threads, each of which has its own.
_dataset: ContextVar[Any] = ContextVar("dataset", default=None)


@contextmanager
def shuffling_each_epoch(dataset: Any) -> Iterator[None]:
    """Let upstream's GPTDataset, which builds its indices in the block, shuffle by epoch."""
    token = _dataset.set(dataset)
    try:
        yield
    finally:
        _dataset.reset(token)


def apply() -> None:
    """Apply the patch."""
    upstream = ORDER.originals()
    ORDER.apply(
        _build_document_index=_documents(upstream["_build_document_index"]),
        _build_shuffle_index=_samples(upstream["_build_shuffle_index"]),
    )


def _states(epochs: int, first: Any, kind: int) -> Iterator[Any]:
    """Yield the random state of each epoch; numpy keeps their numbers in all releases."""
    seed = _dataset.get().config.random_seed
    for epoch in range(epochs):
        yield np.random.RandomState([seed, epoch, kind]) if epoch else first


def _documents(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def build(documents: Any, epochs: int, random: Any, separate_last: bool) -> Any:
        if _dataset.get() is None or epochs == 1:
            return upstream(documents, epochs, random, separate_last)
        shuffled = [upstream(documents, 1, s, False) for s in _states(epochs, random, 0)]
        return np.concatenate(shuffled)

    return build


def _samples(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def build(first_range: int, total: int, random: Any) -> Any:
        dataset = _dataset.get()
        if dataset is None:
            return upstream(first_range, total, random)
        tokens = dataset._get_num_tokens_per_epoch()
        config, epochs = dataset.config, dataset._get_num_epochs(tokens)
        # A sample shared by two epochs belongs to the second.
        ends = [
            (epoch * tokens - config.add_extra_token_to_sequence) // config.sequence_length
            for epoch in range(1, epochs)
        ]
        order_N = np.empty(total, np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64)
        ranges = pairwise([0, *ends, total])
        for (start, stop), state in zip(ranges, _states(epochs, random, 1), strict=True):
            order_N[start:stop] = upstream(stop - start, stop - start, state)
            np.add(order_N[start:stop], start, out=order_N[start:stop])
        return order_N

    return build
