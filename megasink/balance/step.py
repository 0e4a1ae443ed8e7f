"""The head-balance loss from step to step, each with the coefficients of the step before it::

    loss.begin(number)   # before its first microbatch
    ...                  # forward and backward passes; the layers record their gates
    loss.reduce()        # after the last backward: one all-reduce of [L, 2 H + 3] starts
    ...                  # reduction of the gradients, optimizer
    loss.commit()        # every layer has new coefficients; loss.last has the numbers

Shapes: L layers of the model, H query heads, B rows, T tokens of this rank.
"""

from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.balance.gate_sums import HeadStatistics, HeadSums


class Phase(Enum):
    """The stages of a step."""

    BETWEEN = "between two steps"
    RUNNING = "in the forward and backward passes"
    REDUCED = "reduced, not committed"


class RealTokens(NamedTuple):
    """The tokens of a microbatch that count: their mask, and their number here and on all ranks."""

    mask_BT: Tensor
    here: int
    in_row: int


class Factors:
    """The factors on the balance gradient of a microbatch, and the tokens that it counts."""

    share = 1.0
    real: RealTokens | None = None  # of the microbatch that runs forward next
    _targets: Tensor | None = None
    _of_host: Tensor | None = None
    _of_schedule: Tensor | None = None
    # The product of all factors, the same for every layer of a microbatch, and its coefficient.
    _product: tuple[float, Tensor | float] | None = None

    def begin(self, share: float) -> None:
        """Set the share of the coefficient that counts in the step that begins, in [0, 1]."""
        self.share, self._product = share, None

    def set_loss_scale(self, scale: Tensor | float, *, by_schedule: bool = False) -> None:
        """Set the factor by which the loop, or Megatron's schedule, multiplies its loss."""
        setattr(self, "_of_schedule" if by_schedule else "_of_host", torch.as_tensor(scale))
        self._product = None

    def set_targets(self, targets: Tensor) -> None:
        """Set the number of targets of the next forward pass, a scalar."""
        self._targets = targets

    def keep(self, output: Tensor) -> Tensor:
        """Restore the targets and tokens of this microbatch in its backward pass, for recompute."""
        kept = self._targets, self.real
        if kept != (None, None) and output.requires_grad:
            output.register_hook(lambda _: self._restore(*kept))
        return output

    def _restore(self, targets: Tensor | None, real: RealTokens | None) -> None:
        self._targets, self.real = targets, real

    @property
    def targets(self) -> Tensor:
        """The number of targets of the current microbatch, a scalar."""
        if self._targets is None:
            raise RuntimeError(
                "the head-balance loss with calculate_per_token_loss needs the number of targets: "
                "call config.statistics.set_targets in the forward step"
            )
        return self._targets.detach()

    def scaled(self, gradient_H: Tensor, coeff: float, why_scaled: str = "") -> Tensor:
        """Scale a gradient [H] at coefficient 1, in the backward pass: its scale is set by now."""
        given = [x for x in (self._of_host, self._of_schedule) if x is not None]
        if not given and why_scaled:
            raise RuntimeError(
                f"the head-balance loss has no loss scale, and {why_scaled}. Call install(), so "
                "that Megatron's schedules set it (Megatron-Core 0.19 and later), or call "
                "set_loss_scale(fp16 loss scale * context-parallel ranks / number of microbatches) "
                "of the HeadBalance before every backward pass"
            )
        if self._product is None or self._product[0] != coeff:
            product: Tensor | float = self.share * coeff
            for scale in given:
                product = product * scale.detach().reshape(()).to(gradient_H.device)
            self._product = coeff, product
        return gradient_H * self._product[1]


_NOT_BEGUN = (
    "no step has begun, so the head-balance loss would be 0: call install() once, or begin(), "
    "reduce() and commit() in each step. Use torch.no_grad() for a model that does not train"
)


class LossStep:
    """The head-balance loss of one model, from step to step.

    Its `group` is all ranks of the model (None: of the default group); `options`, with the fields
    of :class:`megasink.config.HeadBalanceOptions`, are read at every commit. If it is `installed`,
    the first gates after a step commit it and open the next one.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        options: Any,
        group: ProcessGroup | None = None,
        *,
        installed: bool = False,
    ):
        self.heads = HeadSums(layers, heads, group)
        self.factors = Factors()
        self.sinks: Any = None  # rates of the evaluation that runs, if it counts them
        self.mask: Any = None  # the last attention mask that was checked
        self.masks = 0
        self.may_pad = False  # whether to look for padding that was not marked
        self.phase, self.number = Phase.BETWEEN, -1  # where the current step is
        self.installed = installed
        self.built: set[int] = set()  # layers of this rank that record their gates
        self.expected: dict[Any, int] = {}  # attention layers of the specs, by part of the model
        self._options = options
        self._last: HeadStatistics | None = None
        self._last_number: int | None = None
        self._broken = False

    def begin(self, number: int, *, observe: bool = False, share: float = 1.0) -> None:
        """Begin a step, on every rank, before its first microbatch.

        Args:
            number: Of steps before it. That of a step that was not committed begins it again.
            observe: Whether layers record the series of `heads` too.
            share: Share of the coefficient that counts in this step, in [0, 1] (warmup, decay).
        """
        if self.phase is Phase.RUNNING:
            if number != self.number and self.heads.microbatches:
                raise RuntimeError(f"step {number} begins, but {self._not_reduced()}")
            self.heads.discard()
        elif self.phase is Phase.REDUCED and number != self.number:
            if not self.installed:
                raise RuntimeError(f"step {number} begins, but {self._not_committed()}")
            self.commit()
        self.phase, self.number, self._broken = Phase.RUNNING, number, False
        self.heads.observes = observe
        self.factors.begin(share)

    def open(self) -> bool:
        """Return whether gates count now; an installed loss opens its next step."""
        if self._broken:
            self.discard()
        if self.phase is Phase.RUNNING:
            return True
        share, observe = self.factors.share, self.heads.observes
        if self.phase is Phase.REDUCED and self.runs_again():
            self.begin(self.number, observe=observe, share=share)
        elif self.installed:
            self.begin(self.number + 1, observe=observe, share=share)
        elif self.phase is Phase.REDUCED:
            raise RuntimeError(f"the next step begins, but {self._not_committed()}")
        elif self._options.head_balance_coeff:
            raise RuntimeError(f"a layer counted gates, but {_NOT_BEGUN}")
        return self.phase is Phase.RUNNING

    def reduce(self) -> None:
        """Start the all-reduce of the step: on every rank, after the last backward pass."""
        if self.built and not self.heads.microbatches and self.phase is Phase.REDUCED:
            raise RuntimeError(
                f"reduce() of the head-balance loss was called twice in step {self.number}: "
                "install() calls it from Megatron's schedules, so remove your own call"
            )
        counted = {*self.heads.microbatches}
        silent = self.built - counted if self._options.head_balance_coeff else set()
        if silent and not counted:
            raise RuntimeError(
                "reduce() was called, but no layer has counted a gate, so the head-balance loss "
                "would be 0: gates count only in the backward pass of a model in train() mode"
            )
        if silent:
            raise RuntimeError(
                f"in step {self.number} layers {sorted(counted)} counted gates, but layers "
                f"{sorted(silent)} did not, and would be missing from the loss: call train() on "
                "the whole model, and run no layer under torch.no_grad()"
            )
        if len(self.built) < sum(self.expected.values()):
            raise RuntimeError(
                f"only layers {sorted(self.built)} of {sum(self.expected.values())} attention "
                "layers count their gates, so the loss would miss the others: build every layer "
                "with stack_spec(config) or layer_spec(config)"
            )
        if not self.open():
            raise RuntimeError(f"reduce() of the head-balance loss was called, but {_NOT_BEGUN}")
        self.heads.start_reduction()
        self.phase = Phase.REDUCED

    def commit(self) -> HeadStatistics:
        """End the step: give every layer its importance and the coefficients of the next step.

        Call it on every rank, after the optimizer has stepped or has skipped the step, and before
        a checkpoint is saved. A committed step stays as it is.
        """
        if self.phase is Phase.BETWEEN and self._last is not None:
            return self._last
        if self.phase is not Phase.REDUCED:
            why = self._not_reduced() if self.phase is Phase.RUNNING else _NOT_BEGUN
            raise RuntimeError(f"commit() was called, but {why}")
        coeff = self._options.head_balance_coeff * self.factors.share
        self._last = self.heads.finish_step(coeff, self._options.head_balance_scope)
        self._last_number, self.phase = self.number, Phase.BETWEEN
        return self._last

    def discard(self) -> None:
        """Drop a step that an exception has ended, unless it was committed.

        Call it before the step is repeated, on all ranks, either before or after `reduce`.
        """
        self.heads.discard()
        self._broken = False
        if self.phase is not Phase.BETWEEN:
            self.phase, self.number = Phase.BETWEEN, self.number - 1

    def commit_due(self) -> None:
        """Commit a reduced step of an installed loss, unless it runs again."""
        whole = self.phase is Phase.REDUCED and not self._broken
        if whole and self.installed and not self.runs_again():
            self.commit()

    @property
    def last(self) -> HeadStatistics | None:
        """Statistics of the last step that was committed, on the device; None before."""
        self.commit_due()
        return self._last

    @property
    def last_number(self) -> int | None:
        """The number of that step."""
        self.commit_due()
        return self._last_number

    def runs_again(self) -> bool:
        """Return whether the forward passes after a reduction repeat the step (to check it)."""
        return False

    def set_loss_scale(self, scale: Tensor | float) -> None:
        """Set the factor by which the training loop multiplies its loss, besides that of schedules.

        Without these it is the fp16 loss scale * context-parallel ranks / number of microbatches
        (only the loss scale under ``calculate_per_token_loss``).
        """
        self.factors.set_loss_scale(scale)

    def set_targets(self, targets: Tensor) -> None:
        """Set the number of targets of the next forward pass, on all CP ranks: a scalar."""
        self.factors.set_targets(targets)

    def set_real_tokens(self, real_BT: Tensor | None, in_row: int | None = None) -> None:
        """Set the tokens of the next forward pass that count: all but padding, for example.

        Args:
            real_BT: Bool mask of this rank's tokens (on the host it costs no sync); None for all.
            in_row: Number of real tokens on all context-parallel ranks; None if there is one.
        """
        self.factors.real = None
        if real_BT is not None:
            here = int(real_BT.sum())
            in_row = here if in_row is None else in_row
            self.factors.real = RealTokens(real_BT.bool(), here, in_row)

    def keep(self, output: Tensor) -> Tensor:
        """Return the output of a stage, whose backward pass restores targets and real tokens."""
        return self.factors.keep(output)

    def _not_reduced(self) -> str:
        return (
            f"the gates of step {self.number} were not reduced, so the head-balance loss would be "
            "0: call reduce() on every rank after the last backward pass"
        )

    def _not_committed(self) -> str:
        return (
            f"step {self.number} was not committed, so the head-balance loss would be 0: call "
            "commit() after every optimizer step, including skipped ones, or call install() once"
        )
