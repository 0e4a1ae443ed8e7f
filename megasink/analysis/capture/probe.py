"""Hooks and reports shared by the probes of both kinds of model.

Shapes: B rows, T tokens, E hidden size, H heads, D head dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor

from megasink.analysis.capture.attention_statistics import (
    MAP,
    AttentionCall,
    at_least_float32,
    attention_statistics,
)
from megasink.analysis.capture.first_block_tensors import Sites
from megasink.analysis.capture.head_changes import ForwardPass, HeadChange, HeadFactors, HeadOutputs
from megasink.analysis.capture.segments import Segment
from megasink.analysis.metrics.registry import ATTENTION, GRADIENT
from megasink.errors import ConfigError, UserError

_PROBED: "WeakSet[torch.nn.Module]" = WeakSet()


class Listener:
    """Base class for receivers of statistics, whose tensors the model may overwrite: copy them."""

    # Names of the statistics to capture (`megasink.analysis.metrics.STATISTICS`, `MAP`).
    needs: Set[str] = frozenset()

    def layer(self, sample: int, layer: int, statistics: dict[str, Tensor]) -> None:
        """Receive the statistics of one sequence in one block."""

    def state(self, sample: int, half: int, state_TE: Tensor) -> None:
        """Receive the state x_(half / 2) of one sequence."""


class Probe(ABC):
    """Context manager in which a model passes statistics to a listener, and heads are changed.

    Each change applies to the result of the one before, and the listener sees the last result.
    """

    model: torch.nn.Module
    # The part that runs once in every call, if possible without the output layer.
    body: torch.nn.Module
    heads: list[int]  # H per layer, 0 for a layer without softmax attention
    layers: list[Any]  # arguments of `_attach`

    def __init__(self, problems: list[str], listener: Listener, changes: Sequence[HeadChange] = ()):
        if problems:
            raise ConfigError(problems)
        self.listener, self.needs, self.changes = listener, set(listener.needs), list(changes)
        # Whether the listener needs a gradient: `backward` follows every `forward`.
        self.differentiates = not GRADIENT.keys().isdisjoint(self.needs)
        self._factors: HeadFactors | None = None
        self.current = ForwardPass(0, 0, 0, [])  # the call that runs, or the last one
        self._calls: dict[int, AttentionCall] = {}
        self._gates: dict[int, Tensor] = {}
        self._changed_layers: set[int] = set()
        self._hooks: list[Any] = []
        self._entered = False

    def _install(self) -> None:
        """Prepare the model before its layers get hooks; `_uninstall` must undo it."""
        if self.differentiates:
            self._factors = HeadFactors(self.model)
        self._hooks.append(self.body.register_forward_pre_hook(self._called, with_kwargs=True))
        self._hooks.append(self.body.register_forward_hook(lambda *_: self._end()))

    def _uninstall(self) -> None:  # noqa: B027
        """Undo `_install`, even if it did not finish."""

    @abstractmethod
    def _called(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the sequences of every call of the model."""

    @abstractmethod
    def _output_weight(self, index: int) -> Tensor:
        """Return [H, D, E]: the output projection of one layer by query head."""

    @abstractmethod
    def _attach(self, index: int, layer: Any) -> None:
        """Register read-only hooks on one layer."""

    @abstractmethod
    def forward(
        self, ids_BT: Tensor, mask_BT: Any = None, positions_BT: Any = None, *, logits: bool = True
    ) -> Any:
        """Run one batch; the listener has received all statistics when this returns."""

    @abstractmethod
    def sites(self) -> Sites:
        """Return the sites; see `megasink.analysis.capture.first_block_tensors`."""

    @property
    def segments(self) -> list[Segment]:
        """Sequences of the last batch."""
        return self.current.segments

    @property
    def reads_attention(self) -> bool:
        """Whether the listener or a change needs the inputs of attention."""
        return bool(self.needs) or any(change.reads_attention for change in self.changes)

    @property
    def reads_segments(self) -> bool:
        """Whether the listener or a change needs to know where sequences begin and end."""
        return self.reads_attention or any(change.reads_segments for change in self.changes)

    def __enter__(self) -> Self:
        problems = [problem for change in self.changes for problem in change.problems(self.heads)]
        if problems:
            raise ConfigError(problems)
        if self.model in _PROBED:
            raise UserError(
                "another probe or intervention is open on this model: close it first, or pass all "
                "interventions together (megasink.analysis.interventions)"
            )
        _PROBED.add(self.model)
        self._entered = True
        try:
            self._install()
            for index, layer in enumerate(self.layers):
                self._attach(index, layer)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if not self._entered:
            return
        while self._hooks:
            self._hooks.pop().remove()
        self._calls.clear()
        self._gates.clear()
        if self._factors is not None:
            self._factors.close()
        _PROBED.discard(self.model)
        self._entered = False
        self._uninstall()

    def _begin(self, forward: ForwardPass) -> None:
        """Start a call of the model."""
        self.current = forward
        self._calls.clear()
        self._gates.clear()
        if self._factors is not None:
            self._factors.clear()
        self._changed_layers.clear()
        for change in self.changes:
            change.begin(forward)

    def _end(self) -> None:
        """Check that the changes reached every layer in the call that ends."""
        if not self.changes:
            return
        missed = [i for i, h in enumerate(self.heads) if h and i not in self._changed_layers]
        if missed:
            raise UserError(
                f"layers {missed} of {type(self.model).__name__} bypass their output "
                "projections: megasink cannot change the outputs of their heads"
            )

    def _changed(self, index: int, out_BQHD: Tensor) -> Tensor | None:
        """Apply the changes to the outputs of one layer's heads; None if nothing is changed."""
        call = self._calls.get(index)
        if call is None and any(change.reads_attention for change in self.changes):
            raise UserError(
                f"layer {index} of {type(self.model).__name__} bypasses transformers' attention "
                "interface: megasink cannot read its attention"
            )
        self._changed_layers.add(index)
        outputs = HeadOutputs(index, out_BQHD, call, lambda: self._output_weight(index))
        for change in self.changes:
            new_BQHD = change.change(self.current, outputs)
            if new_BQHD is not None:
                outputs = replace(outputs, out_BQHD=new_BQHD)
        if self._factors is not None and call is not None:
            return self._factors.multiply(index, outputs.out_BQHD, call, self.segments)
        return None if outputs.out_BQHD is out_BQHD else outputs.out_BQHD

    def backward(self, loss: Tensor) -> None:
        """Report the derivative by each head's factor of a scalar loss, summed over sequences."""
        assert self._factors is not None
        for sample, index, gradient_H in self._factors.gradients(loss):
            self.listener.layer(sample, index, {"mask_gradient_H": gradient_H})

    def _before(self, module: torch.nn.Module, do: Callable[[Tensor], Tensor | None]) -> None:
        self._hooks.append(hook_input(module, do))

    def _after(self, module: torch.nn.Module, do: Callable[[Any], None]) -> None:
        self._hooks.append(module.register_forward_hook(lambda _, args, output: do(output)))

    def _rows(self, batch_BTE: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield [T, E] of each sequence of the batch, without padding."""
        for sample, (row, start, stop) in enumerate(self.segments):
            yield sample, at_least_float32(batch_BTE[row, start:stop])

    @torch.no_grad()
    def _state(self, half: int, state_BTE: Tensor) -> None:
        for sample, state_TE in self._rows(state_BTE):
            self.listener.state(sample, half, state_TE)

    @torch.no_grad()
    def _branch(self, name: str, index: int, branch_BTE: Tensor) -> None:
        if name in self.needs:
            for sample, branch_TE in self._rows(branch_BTE):
                self.listener.layer(sample, index, {name: branch_TE})

    @torch.no_grad()
    def _finish(self, index: int, branch_BTE: Tensor) -> None:
        """Report one layer's attention once all of its statistics are known."""
        call = self._calls.pop(index)
        if not self.needs:
            return
        if "output_weight_HDE" in self.needs:
            call.output_weight_HDE = self._output_weight(index)
        wanted = self.needs & {*ATTENTION, MAP}
        for sample, statistics in enumerate(attention_statistics(call, self.segments, wanted)):
            self.listener.layer(sample, index, statistics)
        self._branch("attention_branch_TE", index, branch_BTE)


def hook_input(
    module: torch.nn.Module,
    do: Callable[[Tensor], Tensor | None],
    index: int = 0,
    key: str = "hidden_states",
) -> Any:
    """Call `do` on an argument of a module in every call, and replace it by the result, if any."""

    def hook(_: Any, args: Any, kwargs: Any) -> Any:
        positional = len(args) > index
        at = index if positional else key if key in kwargs else next(iter(kwargs))
        new = do((args if positional else kwargs)[at])
        if new is None:
            return None
        if positional:
            return (*args[:index], new, *args[index + 1 :]), kwargs
        return args, kwargs | {at: new}

    return module.register_forward_pre_hook(hook, with_kwargs=True)


OpenProbe = Callable[..., Probe]
"""Function that makes a probe (not yet entered) from a listener and optional changes to heads."""


PASS_TOKENS = 2048
"""Maximum tokens per forward pass on a CPU. Larger passes are no faster, and need more memory."""
BACKWARD_TOKENS = 512
"""The same with a backward pass, for which the activations of every layer are kept."""
_SECONDS = 1e11
"""Number of weights times number of tokens that two cores process in about two seconds."""


def takes_seconds(module: torch.nn.Module, tokens: int = PASS_TOKENS) -> bool:
    """Return whether one pass takes seconds on a CPU, so that progress is shown immediately."""
    weights = sum(w.numel() for w in module.parameters() if w.device.type == "cpu")
    return tokens * weights > _SECONDS


@dataclass(frozen=True)
class ProbedModel:
    """A loaded model of either kind, ready for probing."""

    open_probe: OpenProbe
    module: torch.nn.Module  # the model, whose weights are part of an analysis's identity
    heads: list[int]  # number of heads in each layer
    tokenizer: Any  # of transformers, or megasink's
    vocabulary: int  # number of ids that the model knows
    positions: int | None  # number of positions it was trained with; None for no limit
    facts: dict[str, Any]  # entries of `ModelFacts`
    first: tuple[int, ...] = ()  # tokens before every sequence, such as a sink token (P2.23)
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json; `with_ends`
    # --replace-tokens-at and --replace-tokens-with of its training.
    replaced_at: tuple[int, ...] = ()
    replaced_with: str | None = None

    @property
    def text_positions(self) -> int | None:
        """Number of positions after `first`; None for no limit."""
        return None if self.positions is None else self.positions - len(self.first)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.module.parameters()).device
