"""What a probe reports, kept by tests."""

from collections.abc import Iterable

from torch import Tensor

from megasink.analysis.capture.probe import Listener


class Kept(Listener):
    """A listener that keeps everything.

    Args:
        needs: the statistics that it asks for.
    """

    def __init__(self, needs: Iterable[str] = ()) -> None:
        self.needs = frozenset(needs)
        self.layers: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.states: dict[tuple[int, int], Tensor] = {}

    def layer(self, sample: int, layer: int, statistics: dict[str, Tensor]) -> None:
        copies = {name: value.clone() for name, value in statistics.items()}
        self.layers.setdefault((sample, layer), {}).update(copies)

    def state(self, sample: int, half: int, state_TE: Tensor) -> None:
        self.states[sample, half] = state_TE.clone()
