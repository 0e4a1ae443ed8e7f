"""Token sequences for probing, and the repetition rate of a text (P2.5, P4.4, P4.14)."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch


def random_sequences(
    count: int, length: int, vocabulary: int, seed: int, exclude: Sequence[int] = ()
) -> list[list[int]]:
    """Draw sequences of tokens uniformly from the vocabulary (P2.5)."""
    allowed = torch.tensor(sorted({*range(vocabulary)} - {*exclude}))
    if not len(allowed):
        raise ValueError(f"no token of {vocabulary} is left to draw from")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(allowed), (count, length), generator=generator)
    sequences: list[list[int]] = allowed[drawn].tolist()
    return sequences


def repeated_sequences(
    count: int, length: int, vocabulary: int, seed: int, exclude: Sequence[int] = ()
) -> list[list[int]]:
    """Return sequences of one random token, repeated `length` times (P2.5)."""
    return [[t] * length for (t,) in random_sequences(count, 1, vocabulary, seed, exclude)]


def repeated_first_token(content: Sequence[int], copies: int, bos: int | None) -> list[int]:
    """Return a sequence whose first token, BOS or the content's first, is repeated (P4.4).

    The loss covers content[1:] in both settings and for every n, so that the same tokens count: the
    last len(content) - 1 targets.
    """
    if copies < 1 or len(content) < 2:
        raise ValueError(
            f"{copies} copies, {len(content)} tokens: use at least 1 copy and 2 tokens"
        )
    first = [content[0]] * copies if bos is None else [bos] * copies + [content[0]]
    return [*first, *content[1:]]


def repeat_rate(documents: Iterable[Sequence[int]], n: int) -> float:
    """Return the share of n-grams with equal tokens (P4.14); none spans two documents."""
    if n < 2:
        raise ValueError(f"{n}-grams: 2 or more tokens")
    total = equal = 0
    for document in documents:
        total += max(0, len(document) - n + 1)
        runs = (len(list(run)) for _, run in groupby(document))
        equal += sum(max(0, run - n + 1) for run in runs)
    if not total:
        raise ValueError(f"no document has {n} tokens")
    return equal / total
