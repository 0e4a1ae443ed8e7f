"""What the probes of both kinds of model share: hooks, and what they report to an observer.

Shapes: B rows, T tokens, E hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor

from megasink.diagnostics.registry import ATTENTION
from megasink.errors import ConfigError
from megasink.probe.segments import Segment
from megasink.probe.sites import Sites
from megasink.probe.statistics import MAP, AttentionCall, at_least_float32, attention_statistics


class Observer:
    """Receives the statistics; samples are numbered within the batch.

    Tensors may alias memory that the model overwrites later: copy anything you keep.

    Attributes:
        needs: names of the statistics to capture (`megasink.diagnostics.STATISTICS`, `MAP`).
    """

    needs: set[str]

    def layer(self, sample: int, layer: int, statistics: dict[str, Tensor]) -> None:
        """Receive the statistics of one sequence in one block."""

    def state(self, sample: int, half: int, state_TE: Tensor) -> None:
        """Receive the state x_(half / 2) of one sequence."""


class Probe(ABC):
    """Context manager in which `forward` runs a model and passes statistics to an observer.

    Attributes:
        heads: H per layer, 0 for a layer without softmax attention.
        layers: what `_attach` takes.
        segments: sequences of the last batch.

    Raises:
        ConfigError: the model cannot be probed; one message lists every reason.
    """

    heads: list[int]
    layers: list[Any]

    def __init__(self, problems: list[str], observer: Observer, needs: set[str]):
        if problems:
            raise ConfigError(problems)
        self.observer = observer
        self.needs = set(needs)
        self.segments: list[Segment] = []
        self._calls: dict[int, AttentionCall] = {}
        self._gates: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    @abstractmethod
    def _attach(self, index: int, layer: Any) -> None:
        """Register read-only hooks on one layer."""

    @abstractmethod
    def forward(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
        *,
        logits: bool = True,
    ) -> Any:
        """Run one batch; the observer has received all statistics when this returns.

        Args:
            logits: False if nobody reads the logits of the output.
        """

    @abstractmethod
    def sites(self) -> Sites:
        """Return the sites; see `megasink.probe.sites`."""

    def __enter__(self) -> Self:
        for index, layer in enumerate(self.layers):
            self._attach(index, layer)
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before(self, module: torch.nn.Module, do: Callable[[Any], None]) -> None:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            do(args[0] if args else kwargs["hidden_states"])

        self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: torch.nn.Module, do: Callable[[Any], None]) -> None:
        self._hooks.append(module.register_forward_hook(lambda _, args, output: do(output)))

    def _rows(self, batch_BTE: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield [T, E] of each sequence of the batch, without padding."""
        for sample, (row, start, stop) in enumerate(self.segments):
            yield sample, at_least_float32(batch_BTE[row, start:stop])

    def _state(self, half: int, state_BTE: Tensor) -> None:
        for sample, state_TE in self._rows(state_BTE):
            self.observer.state(sample, half, state_TE)

    def _branch(self, name: str, index: int, branch_BTE: Tensor) -> None:
        if name in self.needs:
            for sample, branch_TE in self._rows(branch_BTE):
                self.observer.layer(sample, index, {name: branch_TE})

    def _report(self, index: int, call: AttentionCall, branch_BTE: Tensor) -> None:
        """Report one layer's attention once everything about it is known."""
        wanted = self.needs & {*ATTENTION, MAP}
        for sample, found in enumerate(attention_statistics(call, self.segments, wanted)):
            self.observer.layer(sample, index, found)
        self._branch("attention_branch_TE", index, branch_BTE)


OpenProbe = Callable[[Observer], AbstractContextManager[Probe]]
"""Creates a probe that reports to the given observer."""
