"""Locate the sequences of a batch: padding on either side, or packed documents.

Shapes: B rows, T tokens, Q queries, K keys.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasink.errors import UserError


class Segment(NamedTuple):
    """One sequence: the tokens from `start` up to, not including, `stop` of a row."""

    row: int
    start: int
    stop: int


def segments_of(
    shape: tuple[int, int], attention_mask_BT: Tensor | None, position_ids_BT: Tensor | None
) -> list[Segment]:
    """Return the sequences of a batch: masked tokens, or documents where positions restart."""
    rows, tokens = shape
    segments = []
    if attention_mask_BT is None:
        if position_ids_BT is None:
            return [Segment(row, 0, tokens) for row in range(rows)]
        positions_BT = position_ids_BT.expand(rows, tokens).cpu()
        for row in range(rows):
            breaks = (positions_BT[row].diff() != 1).nonzero().flatten() + 1
            bounds = [0, *breaks.tolist(), tokens]
            segments += [Segment(row, start, stop) for start, stop in pairwise(bounds)]
        return segments
    for row, mask_T in enumerate(attention_mask_BT.to("cpu", torch.bool)):
        real = mask_T.nonzero().flatten()
        if not len(real):
            raise UserError(f"row {row} of the batch is all padding: leave it out")
        start, stop = int(real[0]), int(real[-1]) + 1
        if len(real) != stop - start:
            raise UserError(
                f"row {row} of the batch has padding between real tokens (positions {start} to "
                f"{stop - 1} have {len(real)} real tokens): pad on one side"
            )
        segments.append(Segment(row, start, stop))
    if position_ids_BT is not None and position_ids_BT.shape in ((rows, tokens), (1, tokens)):
        positions_BT = position_ids_BT.expand(rows, tokens).cpu()
        for row, start, stop in segments:
            again = (positions_BT[row, start:stop].diff() <= 0).nonzero().flatten()
            if len(again):
                raise UserError(
                    f"positions of row {row} of the batch restart at token "
                    f"{start + int(again[0]) + 1}, but its attention mask describes one "
                    "sequence: pass no mask with packed documents"
                )
    return segments


def whole_rows(segments: list[Segment], shape: tuple[int, int]) -> bool:
    """Return whether every row is one sequence without padding."""
    rows, tokens = shape
    return segments == [Segment(row, 0, tokens) for row in range(rows)]


def check_mask(
    mask_BQK: Tensor,
    segments: list[Segment],
    window: int | None,
    first_query: int = 0,
    first_key: int = 0,
) -> str | None:
    """Return how a mask, bool or additive, differs from causal attention in segments, or None."""
    for row, start, stop in segments:
        begin = max(start, first_query)
        seen_QK = mask_BQK[
            min(row, len(mask_BQK) - 1), begin - first_query : max(stop - first_query, 0)
        ]
        if seen_QK.dtype is not torch.bool:
            added_QK, seen_QK = seen_QK, seen_QK > torch.finfo(seen_QK.dtype).min / 2
            if bool(added_QK[seen_QK].any()):
                return "it adds numbers other than 0 to the scores"
        position_Q = torch.arange(begin, begin + len(seen_QK), device=seen_QK.device)
        first_Q = torch.full_like(position_Q, max(start, first_key))
        if window is not None:
            first_Q = torch.maximum(first_Q, position_Q - window + 1)
        ends_Q = seen_QK.gather(1, first_Q[:, None] - first_key)
        ends_Q = ends_Q & seen_QK.gather(1, position_Q[:, None] - first_key)
        expected_Q = position_Q - first_Q + 1
        wrong_Q = (seen_QK.sum(-1) != expected_Q) | ~ends_Q[:, 0]
        if bool(wrong_Q.any()):
            index = int(wrong_Q.nonzero()[0])
            where = "" if window is None else f" in a window of {window}"
            return (
                f"query {begin + index} of row {row} sees {int(seen_QK[index].sum())} keys, but "
                f"with causal attention{where} over tokens {start} to {stop - 1} it would see "
                f"{int(expected_Q[index])}"
            )
    return None


def refuse_chosen_keys(module: Any, keys: int, kwargs: dict[str, Any]) -> None:
    """Refuse sparse attention that leaves keys out: models apply it to masks of sdpa and eager."""
    most = keys
    if (chosen := kwargs.get("indices")) is not None:
        most = chosen.shape[-1]
    elif (chosen := kwargs.get("block_indices")) is not None:
        most = chosen.shape[-1] * module.config.index_block_size
    if most < keys:
        raise UserError(
            f"{type(module).__name__} attends to {most} of {keys} keys (sparse attention): use "
            f"texts of at most {most} tokens"
        )
