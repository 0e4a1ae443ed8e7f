"""The head-balance loss from step to step: begin, reduce, commit.

The gradient of the default scope needs the importance of a whole global batch, so every step uses
the coefficients of the step before it. One step is::

    step.begin(number)   # before its first microbatch
    ...                  # forward and backward passes; the layers record their gates
    step.reduce()        # after the last backward: one all-reduce of [L, 2 H + 3] starts
    ...                  # reduction of the gradients, optimizer
    step.commit()        # every layer has new coefficients; step.last has the numbers

Between `commit` and the next `begin` the state (the layers' buffers `coefficients`, `routed` and
`steps`) is that of whole steps, and may be saved. A step that is begun again with the same number,
after its reduction, is run again: it sees the same coefficients, and its sums replace the first.

Shapes: L layers of the model, H query heads.
"""

import warnings
from enum import Enum
from typing import Protocol

from torch.distributed import ProcessGroup

from megasink.balance.attach import HeadBalanceScale
from megasink.balance.sums import HeadStatistics, HeadSums


class StepOptions(Protocol):
    """The options of the loss that a step reads."""

    @property
    def head_balance_coeff(self) -> float: ...
    @property
    def head_balance_scope(self) -> str: ...


class Phase(Enum):
    """The stages of a step."""

    BETWEEN = "between two steps"
    RUNNING = "in the forward and backward passes"
    REDUCED = "reduced, not committed"


class LossStep:
    """The head-balance loss of one model, from step to step.

    Whoever runs the training loop calls `begin`, `reduce` and `commit`, or the hooks of
    :class:`megasink.megatron.HeadBalance` do. Without `begin` the first gates after a commit open
    the next step.

    Args:
        layers: Layers of the whole model.
        heads: Query heads of a layer.
        options: Coefficient and scope; read at every commit.
        group: All ranks of the model; None for those of the default group.

    Attributes:
        heads: Sums of the step's gates.
        balance: The factors on the gradient.
        phase: Where the current step is.
        number: The current step, or the last one; -1 before the first.
        last: Statistics of the step `last_number`, the last that was committed; None before.
        may_skip: Whether a step may end without a step of the optimizer: false until one has
            stepped, because a loop whose optimizer is never seen would never commit.
        has_layers: Whether layers of this rank were built to record their gates.
    """

    def __init__(
        self, layers: int, heads: int, options: StepOptions, group: ProcessGroup | None = None
    ):
        self.heads = HeadSums(layers, heads, group)
        self.balance = HeadBalanceScale()
        self.phase = Phase.BETWEEN
        self.number = -1
        self.last: HeadStatistics | None = None
        self.last_number: int | None = None
        self.may_skip = False
        self.has_layers = False
        self._options = options
        self._stepped_without_reduction = self._warned = False

    def begin(self, number: int, *, observe: bool = False, share: float = 1.0) -> None:
        """Open a step, on every rank; again for each microbatch changes nothing.

        Args:
            number: Of the step: steps that were completed before it. The number of a step that was
                reduced and not committed runs that step again.
            observe: Whether layers record the series of `heads` too.
            share: Share of the coefficient that counts in this step, in [0, 1] (warmup, decay).
        """
        if self.phase is Phase.RUNNING and number == self.number:
            return
        if self.phase is Phase.RUNNING and self.heads.has_sums:
            raise RuntimeError(f"step {number} begins, and {self._not_reduced()}")
        if self.phase is Phase.REDUCED and number != self.number:
            raise RuntimeError(f"step {number} begins, and {self._not_committed()}")
        self.phase, self.number = Phase.RUNNING, number
        self._stepped_without_reduction = False
        self.heads.observes = observe
        self.balance.begin(share)

    def open(self) -> None:
        """Make sure that a step is open: open the next one, or reopen the same.

        Layers call it before they add to `heads`; a host that calls `begin` has opened it already.
        """
        if self._stepped_without_reduction:
            raise RuntimeError(f"the optimizer has stepped, but {self._not_reduced()}")
        if self.phase is Phase.RUNNING:
            return
        share, observe = self.balance.share, self.heads.observes
        self.commit_skipped()
        if self.phase is Phase.BETWEEN:
            self.begin(self.number + 1, observe=observe, share=share)
        elif self.runs_again():
            self.begin(self.number, observe=observe, share=share)
        else:
            raise RuntimeError(f"the next step begins, but {self._not_committed()}")

    def reduce(self) -> None:
        """Start the all-reduce of the step: on every rank, after the last backward pass."""
        if self.has_layers and not self.heads.has_sums:
            self._counted_nothing()
        if not self._warned and (layers := self.heads.without_backward()):
            self._warned = True
            warnings.warn(
                f"step {self.number}: layers {layers} counted forward passes without a backward "
                "pass before reduce(). Run passes that do not train under torch.no_grad(), "
                "recompute with Megatron's functions, and after an exception call discard() "
                "before you repeat the step",
                stacklevel=2,
            )
        # What has stepped may be the optimizer of another model, between the passes of this one.
        self._stepped_without_reduction = False
        self.open()
        self.heads.start_reduction()
        self.phase = Phase.REDUCED

    def commit(self) -> HeadStatistics:
        """End the step: give every layer its importance and the coefficients of the next step.

        A step that the optimizer's hook has committed stays as it is.

        Call it on every rank, after the optimizer has stepped or has skipped the step, and before
        a checkpoint is saved. It waits for the all-reduce, on the device.

        Returns:
            The statistics, on the device; reading one waits for it.
        """
        if self.phase is Phase.BETWEEN and self.last is not None:
            return self.last
        if self.phase is not Phase.REDUCED:
            raise RuntimeError(
                f"commit() was called, but {self._not_reduced()}"
                if self.phase is Phase.RUNNING
                else "commit() of the head-balance loss was called before begin(): call begin() "
                "before the step and reduce() after its last backward pass"
            )
        coeff = self._options.head_balance_coeff * self.balance.share
        self.last = self.heads.finish_step(coeff, self._options.head_balance_scope)
        self.last_number, self.phase = self.number, Phase.BETWEEN
        return self.last

    def discard(self) -> None:
        """Drop a step that an exception has ended: its microbatches do not count.

        Call it before the step is repeated, on every rank, and on all of them either before or
        after `reduce`. A step that was committed, by the optimizer, stays.
        """
        self.heads.discard()
        self._stepped_without_reduction = False
        if self.phase is not Phase.BETWEEN:
            self.phase, self.number = Phase.BETWEEN, self.number - 1

    def runs_again(self) -> bool:
        """Return whether the forward passes after a reduction repeat the step (to check it)."""
        return False

    def scales_loss(self) -> bool:
        """Return whether other losses are scaled (fp16), and steps that overflow skipped."""
        return False

    def commit_skipped(self) -> None:
        """Commit a step that the optimizer has skipped, and that nobody has committed."""
        skips = self.may_skip or self.scales_loss()
        if self.phase is Phase.REDUCED and skips and not self.runs_again():
            self.commit()

    def optimizer_stepped(self) -> None:
        """Commit the step; or remember that the optimizer stepped before its reduction."""
        self.may_skip = True
        if self.phase is Phase.REDUCED:
            self.commit()
        elif self.phase is Phase.RUNNING and self.heads.has_sums:
            self._stepped_without_reduction = True

    def _not_reduced(self) -> str:
        return (
            f"the gates of step {self.number} were not reduced, so the head-balance loss would "
            "be 0: call its reduce() on every rank after the last backward pass, or set "
            "config.finalize_model_grads_func (Megatron's schedules then call reduce() first). "
            "Run a model that does not train under torch.no_grad()"
        )

    def _counted_nothing(self) -> None:
        if self.phase is Phase.REDUCED:
            raise RuntimeError(
                f"reduce() of the head-balance loss is called twice in step {self.number}: where "
                "config.finalize_model_grads_func is set, Megatron's schedules call it already"
            )
        if self._options.head_balance_coeff:
            raise RuntimeError(
                "reduce() was called, but no layer has counted a gate, so the head-balance loss "
                "would be 0: gates count in forward passes of model.train() with gradients on"
            )

    def _not_committed(self) -> str:
        return (
            f"step {self.number} was not committed, so the head-balance loss would be 0: call its "
            "commit() after every optimizer step, also a skipped one (the hook on torch.optim does "
            "so for steps that run), and reduce() once a step, after the last backward pass"
        )
