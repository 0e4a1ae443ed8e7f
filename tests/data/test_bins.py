"""Best-fit decreasing on a histogram: the bins of the algorithm item by item."""

from bisect import bisect_left, insort

import numpy as np
import pytest

from megasink.data.bins import best_fit


def one_by_one(lengths, capacity) -> int:
    """The number of bins, by the definition."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = bisect_left(rooms, length)
        room = rooms.pop(at) if at < len(rooms) else capacity
        insort(rooms, room - length)
    return len(rooms)


@pytest.mark.parametrize("capacity", [1, 7, 64, 1000])
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_every_item_is_in_one_bin_and_no_bin_overflows(capacity, spread):
    draw = np.random.default_rng(capacity)
    lengths = np.clip(draw.lognormal(np.log(capacity / 8), spread, 3000), 1, capacity).astype(int)
    bins = best_fit(lengths, capacity)
    assert sorted(bins.ranks_N) == list(range(3000))
    longest_first = np.sort(lengths)[::-1]
    filled = [longest_first[bins[i]].sum() for i in range(len(bins))]
    assert max(filled) <= capacity
    assert len(bins) == one_by_one(lengths.tolist(), capacity)


def test_lengths_that_fit_in_no_bin_are_an_error():
    assert len(best_fit(np.zeros(0, int), 5)) == 0
    for lengths in ([6], [0, 5]):
        with pytest.raises(ValueError, match="for bins of 5"):
            best_fit(np.array(lengths), 5)
