"""Replaced tokens in training and its evaluations (--replace-tokens-at; P2.15, P2.16).

A sequence is the text that attention sees: a document under --dataloader-inter-document-masking
(its part in the sample, if it was cut), otherwise the sample. The data set replaces its tokens
before they become inputs and targets, as P2 does. A random token depends on the seed and on where
in the data set the sequence begins, so it is the same in every epoch, layout and resumed run.

Shapes: B microbatch, S sequence.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megasink.data.replaced_tokens import Replacement


def replace_in_sample(
    replacement: Replacement,
    ids: NDArray[np.int64],
    documents: Sequence[int],
    lengths: Sequence[int],
    offset: int,
    *,
    packed: bool,
) -> None:
    """Replace the tokens of one sample's sequences, [S + 1] with padding at the end, in place.

    `lengths` has the tokens of each document in this sample, the first one from `offset` on; if
    `packed`, the documents do not see each other.
    """
    bounds = [0, *np.cumsum(lengths).tolist()] if packed else [0, sum(lengths)]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        place = 0 if number else offset
        replacement.replace(ids[start:stop], int(documents[number]), place)


def text_targets(
    positions: Sequence[int], targets_BS: Tensor, cu_seqlens: Tensor | None, *, sink_token: bool
) -> Tensor:
    """Return which targets are text, [B, S] bool; replaced tokens have no bytes of text.

    `cu_seqlens` has the starts of documents, [B, S + 1] int32 padded with S; None for one sequence.
    A sink token at the start does not count as a position. The last target of a packed sample is
    the next token of the last document, or the first one of another: False if either is replaced.
    """
    rows, length = targets_BS.shape
    index_S = torch.arange(length, device=targets_BS.device)
    replaced = torch.tensor(list(positions), device=targets_BS.device)
    if cu_seqlens is None:
        position_S = index_S + (0 if sink_token else 1)
        return ~torch.isin(position_S, replaced).expand(rows, length)
    begins = torch.zeros(rows, length + 1, dtype=torch.long, device=targets_BS.device)
    begins.scatter_(1, cu_seqlens.long(), 1)
    index = torch.arange(length + 1, device=targets_BS.device)
    # Where the document of each token begins; the token after the sample still belongs to the last.
    begins[:, length] = 0
    start = (index * begins).cummax(dim=1).values
    dropped = torch.isin((index - start)[:, 1:], replaced)
    dropped[:, -1] |= 0 in positions
    return ~dropped
