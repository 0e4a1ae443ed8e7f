"""The head-balance loss of one layer: its state, its coefficients, and where its gradient enters.

Layers in Megatron (`megatron/layer_balance.py`) and transformers (`transformers/balance_layer.py`)
extend it; they differ in where gates, tokens and groups of ranks come from.

Shapes: H query heads of the layer, h those of this tensor-parallel rank.
"""

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.balance.loss import head_balance_gradient, head_balance_loss, routed_heads
from megasink.balance.step import LossStep


class BalanceOptions(Protocol):
    """The options of :class:`megasink.config.HeadBalanceOptions` that a layer reads."""

    @property
    def head_balance_coeff(self) -> float: ...
    @property
    def head_balance_scope(self) -> str: ...
    @property
    def head_balance_shared_heads(self) -> int: ...
    @property
    def head_balance_shared_refresh(self) -> int: ...


class LayerBalance(torch.nn.Module):
    """Records the importance of a layer's heads and attaches the gradient of the loss.

    Attributes:
        coefficients: [H] float32, dL/dImp at coefficient 1 from the importance of the previous
            step's global batch (scope global); 0 before the first step. Saved in checkpoints, so
            that resumed runs are bit-exact.
        routed: [H] bool, the heads covered by the loss (P0.15): all heads without sharing; with
            sharing, none before the first step.
        steps: Number of completed steps.
    """

    coefficients: Tensor
    routed: Tensor
    steps: Tensor

    def __init__(
        self,
        options: BalanceOptions,
        statistics: LossStep,
        layer: int,
        heads: int,
        tp_group: ProcessGroup,
        cp_size: int = 1,
        device: torch.device | int | None = None,
    ):
        super().__init__()
        self.options = options
        self._statistics = statistics
        if heads > statistics.heads.heads:
            raise ValueError(
                f"layer {layer} has {heads} heads, but the head-balance loss was made for "
                f"{statistics.heads.heads}: make it from the config with the most heads"
            )
        statistics.built.add(layer)
        self.layer = layer
        self.tp_group = tp_group
        self.cp_size = cp_size
        self._first = heads // tp_group.size() * tp_group.rank()  # of this rank's heads
        self.register_buffer("coefficients", torch.zeros(heads, device=device))
        shares = options.head_balance_shared_heads > 0
        self.register_buffer("routed", torch.full((heads,), not shares, device=device))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64, device=device))

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._statistics.commit_due()
        super()._save_to_state_dict(*args, **kwargs)

    def targets(self) -> Tensor | None:
        """Return the number of targets of the microbatch by which its loss is weighted."""
        raise NotImplementedError

    def importance_group(self) -> ProcessGroup:
        """Return the ranks over whose tokens the importance of a microbatch is averaged.

        Not called in the scope "global".
        """
        raise NotImplementedError

    def record(self, gate_sum_h: Tensor, tokens: int) -> None:
        """Add one microbatch to the statistics of the step."""
        if not self._statistics.open():
            return
        self._statistics.heads.record(
            self.layer, self._first, gate_sum_h, tokens, self.routed, self._receive
        )

    def attach(
        self,
        output: Tensor,
        gate_sum_h: Tensor,
        tokens: int,
        observe: Callable[[Tensor], None] | None = None,
        in_row: int | None = None,
    ) -> Tensor:
        """Return `output` unchanged, with a backward that also runs that of the loss."""
        coeff, factors = self.options.head_balance_coeff, self._statistics.factors
        heads = self._statistics.heads
        microbatches = heads.microbatches[self.layer]
        coefficients = self._coefficients(gate_sum_h, tokens, in_row)
        # This rank's share of the microbatch's importance: Megatron sums over context-parallel
        # ranks, or averages and includes their number in the loss scale. The gradient is divided,
        # not the sum: one launch per layer less.
        count = tokens * self.cp_size if in_row is None else in_row

        passes = 0

        def gradient() -> Tensor | None:
            nonlocal passes
            passes += 1
            if passes > 1:
                warnings.warn(
                    f"layer {self.layer}: a second backward pass runs through the same forward "
                    "pass; only the first counts for the head-balance loss",
                    stacklevel=2,
                )
                return None
            heads.awaiting[self.layer] -= 1
            sent_h = factors.scaled(coefficients(), coeff, self._why_scaled(microbatches))
            if observe is not None:
                observe(sent_h)
            return sent_h / count

        attached = attach_gradient(output, gate_sum_h, gradient)
        heads.awaiting[self.layer] += attached.requires_grad  # not of a frozen layer
        return attached

    def _why_scaled(self, microbatches: int) -> str:
        """Return why the loss scale of this microbatch, the step's last so far, is not 1."""
        if microbatches > 1:
            return (
                f"this is microbatch {microbatches} of its step, and each would count in full (a "
                "forward pass without a backward pass counts too: use torch.no_grad() or discard())"
            )
        if self.cp_size > 1:
            return f"{self.cp_size} context-parallel ranks average their gradients"
        return "fp16 scales the other losses" if getattr(self.options, "fp16", False) else ""

    def _coefficients(
        self, gate_sum_h: Tensor, tokens: int, in_row: int | None
    ) -> Callable[[], Tensor]:
        """Return a function that computes dL/dImp [h] at coefficient 1 in the backward pass.

        In the scope of several replicas, whose packed rows may have uneven numbers of tokens, it is
        multiplied by this microbatch's share of the tokens over that of an even split.

        If microbatches are weighted by their targets, the result is multiplied by the targets of
        this one, because the loss scale divides by those of the global batch: the same weight as
        in the language-model loss.
        """
        targets = self.targets()
        if self.options.head_balance_scope == "global":
            of_last_step_h = own_heads(self.coefficients, self.tp_group)
            return lambda: of_last_step_h if targets is None else of_last_step_h * targets
        group = self.importance_group()
        sums = ImportanceSum(gate_sum_h, tokens, self.tp_group, group, targets)

        def of_this_microbatch() -> Tensor:
            importance_H = sums.importance()
            loss = head_balance_loss(importance_H, 1.0, self.routed)
            self._statistics.heads.record_loss(self.layer, self._first, loss)
            gradient_H = head_balance_gradient(importance_H, 1.0, self.routed)
            gradient_h = own_heads(gradient_H, self.tp_group)
            if in_row is not None and self.options.head_balance_scope == "data-parallel":
                gradient_h = gradient_h * (in_row / (sums.mean_tokens() * self.cp_size))
            return gradient_h if targets is None else gradient_h * sums.mean_targets()

        return of_this_microbatch

    def _receive(self, importance_H: Tensor, gradient_H: Tensor) -> None:
        """Receive Imp and dL/dImp at coefficient 1 over the global batch, at the end of a step."""
        own = len(self.coefficients)  # fewer than the model's, where layers differ
        importance_H, gradient_H = importance_H[:own], gradient_H[:own]
        shared = self.options.head_balance_shared_heads
        refresh = self.options.head_balance_shared_refresh
        if shared:
            # Without a device sync: choose at the first step and every `refresh` steps.
            due = self.steps == 0
            if refresh:
                due = self.steps % refresh == 0
            self.routed = torch.where(due, routed_heads(importance_H, shared), self.routed)
            gradient_H = head_balance_gradient(importance_H, 1.0, self.routed)
        self.steps += 1
        self.coefficients = gradient_H.clone()  # else a checkpoint would hold every layer's


class _AttachGradient(torch.autograd.Function):
    """Identity on ``output``; sends ``gradient()`` back to the gates."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, gate_sum_H: Tensor, gradient: Callable[[], Tensor | None]
    ) -> Tensor:
        ctx.gradient = gradient
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output, ctx.gradient(), None


def attach_gradient(
    output: Tensor, gate_sum_H: Tensor, gradient: Callable[[], Tensor | None]
) -> Tensor:
    """Return ``output`` unchanged, with a backward that also propagates a loss on the importance.

    The head-balance loss is not linear in the importance, so its gradient dL/dImp is computed
    where all heads and tokens of its scope are known, and enters here as a constant.
    """
    result: Tensor = _AttachGradient.apply(output, gate_sum_H, gradient)
    return result


class ImportanceSum:
    """The importance of all heads of a layer over the tokens of a group of ranks.

    The constructor starts the all-reduce in the forward pass; reading the result in the backward
    pass waits for it.
    """

    def __init__(
        self,
        gate_sum_h: Tensor,
        tokens: int,
        tp_group: ProcessGroup,
        group: ProcessGroup,
        targets: Tensor | None = None,
    ):
        own, tp_rank = len(gate_sum_h), tp_group.rank()
        self._replicas = group.size() // tp_group.size()
        # A sum per head, then tokens and targets.
        self._sums = gate_sum_h.new_zeros(own * tp_group.size() + 2)
        self._sums.narrow(0, tp_rank * own, own).copy_(gate_sum_h.detach())
        if tp_rank == 0:  # the other ranks of its group have the same tokens
            self._sums[-2] = tokens
            if targets is not None:
                self._sums[-1] = targets
        self._work: Any = None
        if group.size() > 1:
            self._work = torch.distributed.all_reduce(self._sums, group=group, async_op=True)

    def importance(self) -> Tensor:
        """Return the importance [H], the same on every rank of the group; not differentiable."""
        self._wait()
        return self._sums[:-2] / self._sums[-2]

    def mean_tokens(self) -> Tensor:
        """Return the mean of `tokens` over the group's ranks with tokens of their own, a scalar."""
        self._wait()
        return self._sums[-2] / self._replicas

    def mean_targets(self) -> Tensor:
        """Return the mean of `targets` over the group's microbatches, a scalar."""
        self._wait()
        return self._sums[-1] / self._replicas

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def own_heads(importance_H: Tensor, tp_group: ProcessGroup) -> Tensor:
    """Return this rank's slice [h] of a tensor [H] over all heads."""
    count = importance_H.shape[-1] // tp_group.size()
    return importance_H.narrow(-1, tp_group.rank() * count, count)
