"""Pack lengths into bins of one size: best-fit decreasing, on the histogram of the lengths.

Best-fit decreasing fills bins to the last percents (arXiv:2404.10830, which packs documents so); as
in arXiv:2107.02027, items of the same length are placed together, so that the time depends on the
number of different lengths, and an item on the length alone.

Shapes: N items, M bins.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Bins:
    """Which items are in each bin.

    Attributes:
        ranks_N: items, bin after bin; an item is its rank among the lengths, the longest first.
        starts_M1: [M + 1] where each bin begins in them.
    """

    ranks_N: NDArray[np.int64]
    starts_M1: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts_M1) - 1

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        return self.ranks_N[self.starts_M1[number] : self.starts_M1[number + 1]]


def best_fit(lengths_N: NDArray[np.integer], capacity: int) -> Bins:
    """Place every item, the longest first, into the fullest bin that has room for it.

    Args:
        lengths_N: of the items, in 1..capacity.
        capacity: of a bin.

    Raises:
        ValueError: a length is not in this range.
    """
    lengths, counts = np.unique(lengths_N, return_counts=True)
    if len(lengths) and not (lengths[0] >= 1 and lengths[-1] <= capacity):
        raise ValueError(f"lengths of {lengths[0]} to {lengths[-1]} for bins of {capacity}")
    bin_of_N = np.empty(len(lengths_N), dtype=np.int64)
    open_bins = _OpenBins()
    placed = made = 0
    for length, count in zip(lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = placed + count
        while placed < end:
            room, bins = open_bins.take(length)
            if bins is None:
                room = capacity
                bins = np.arange(made, made + -(-(end - placed) // (room // length)))
                made += len(bins)
            # A bin remains the fullest with room until it has none.
            each = room // length
            whole, rest = divmod(min(end - placed, each * len(bins)), each)
            items = np.append(bins[:whole].repeat(each), bins[whole : whole + 1].repeat(rest))
            bin_of_N[placed : placed + len(items)] = items
            placed += len(items)
            open_bins.put(room - each * length, bins[:whole])
            open_bins.put(room - rest * length, bins[whole : whole + 1])
            open_bins.put(room, bins[whole + 1 :])
    starts = np.zeros(made + 1, dtype=np.int64)
    np.cumsum(np.bincount(bin_of_N, minlength=made), out=starts[1:])
    return Bins(np.argsort(bin_of_N, kind="stable"), starts)


class _OpenBins:
    """Bins by the room that is left in them."""

    def __init__(self) -> None:
        self._rooms: list[int] = []
        self._bins: dict[int, list[NDArray[np.int64]]] = {}

    def take(self, length: int) -> tuple[int, NDArray[np.int64] | None]:
        """Remove some bins of the least room that is at least `length`; None if there are none."""
        at = bisect_left(self._rooms, length)
        if at == len(self._rooms):
            return 0, None
        room = self._rooms[at]
        bins = self._bins[room].pop()
        if not self._bins[room]:
            del self._bins[room], self._rooms[at]
        return room, bins

    def put(self, room: int, bins: NDArray[np.int64]) -> None:
        if not room or not len(bins):
            return
        if room not in self._bins:
            self._bins[room] = []
            insort(self._rooms, room)
        self._bins[room].append(bins)
