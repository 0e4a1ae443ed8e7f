"""The head-balance loss of one layer: its state, its coefficients, and where its gradient enters.

Layers in Megatron (`megatron/layer_balance.py`) and transformers (`transformers/balance_layer.py`)
extend it; they differ in where gates, tokens and groups of ranks come from.

Shapes: H query heads of the layer, h those of this tensor-parallel rank.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.balance.loss import head_balance_gradient, head_balance_loss, routed_heads
from megasink.balance.step import LossStep


class LayerBalance(torch.nn.Module):
    """Records the importance of a layer's heads and attaches the gradient of the loss.

    Its buffers are in checkpoints, so that resumed runs are bit-exact.
    """

    coefficients: Tensor
    """[H] float32, dL/dImp at coefficient 1 from the global batch of the last step; initially 0."""
    routed: Tensor
    """[H] bool, the heads covered by the loss (P0.15); initially none if some are shared."""
    steps: Tensor
    """Number of completed steps."""

    def __init__(
        self,
        options: Any,
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
                f"layer {layer} has {heads} heads, but the head-balance loss was created for "
                f"{statistics.heads.heads}: create it from the config with the most heads"
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
        """Return the ranks over whose tokens a microbatch's importance counts; not for "global"."""
        raise NotImplementedError

    def record(self, gate_sum_h: Tensor, tokens: int) -> None:
        """Add one microbatch to the statistics of the step, which an installed loss may begin."""
        if not self._statistics.open():
            return
        heads, first = self._statistics.heads, self._first
        heads.record(self.layer, first, gate_sum_h, tokens, self.routed, self._receive)

    def attach(
        self,
        output: Tensor,
        gate_sum_h: Tensor,
        tokens: int,
        observe: Callable[[Tensor], None] | None = None,
        in_row: int | None = None,
    ) -> Tensor:
        """Return `output` unchanged; its backward pass counts the gates and runs that of the loss.

        So a forward pass alone does not count. Where no backward pass comes, gates count at once.
        """
        coeff, factors = self.options.head_balance_coeff, self._statistics.factors
        if not self._statistics.open():
            return output
        if not (coeff and (output.requires_grad or gate_sum_h.requires_grad)):
            self.record(gate_sum_h, tokens)
            return output
        counted_h = gate_sum_h.detach()
        coefficients = self._coefficients(gate_sum_h, tokens, in_row)
        # Megatron sums over context-parallel ranks, or averages and includes their number in the
        # loss scale. The gradient is divided, not the sum: one launch per layer less.
        count = tokens * self.cp_size if in_row is None else in_row
        done = False

        def gradient() -> Tensor | None:
            nonlocal done
            if done:
                warnings.warn(
                    f"layer {self.layer}: a second backward pass through the same forward pass "
                    "does not count for the head-balance loss",
                    stacklevel=2,
                )
                return None
            done = True
            self.record(counted_h, tokens)
            self._statistics.heads.ran_backward = True
            sent_h = factors.scaled(coefficients(), coeff, self._why_scaled())
            if observe is not None:
                observe(sent_h)
            return sent_h / count

        return attach_gradient(output, gate_sum_h, gradient)

    def _why_scaled(self) -> str:
        """Return why the loss scale of this microbatch, the step's last so far, is not 1."""
        if (number := self._statistics.heads.microbatches[self.layer]) > 1:
            return f"microbatch {number} of this step would add its loss in full"
        if self.cp_size > 1:
            return f"{self.cp_size} context-parallel ranks average their gradients"
        return "fp16 scales the other losses" if getattr(self.options, "fp16", False) else ""

    def _coefficients(
        self, gate_sum_h: Tensor, tokens: int, in_row: int | None
    ) -> Callable[[], Tensor]:
        """Return a function that computes dL/dImp [h] at coefficient 1 in the backward pass.

        Replicas with uneven numbers of tokens weigh by their share of them. The loss scale divides
        by the targets of the global batch, if any, so this microbatch multiplies by its own.
        """
        targets = self.targets()
        if self.options.head_balance_scope == "global":
            of_last_step_h = own_heads(self.coefficients, self.tp_group)
            return lambda: of_last_step_h if targets is None else of_last_step_h * targets
        group, tp_rank = self.importance_group(), self.tp_group.rank()
        own, replicas = len(gate_sum_h), group.size() // self.tp_group.size()
        # A sum per head, then tokens and targets, of all ranks of the group.
        sums = gate_sum_h.new_zeros(own * self.tp_group.size() + 2)
        sums.narrow(0, tp_rank * own, own).copy_(gate_sum_h.detach())
        if tp_rank == 0:  # the other ranks of its group have the same tokens
            sums[-2] = tokens
            if targets is not None:
                sums[-1] = targets
        work: Any = None
        if group.size() > 1:
            work = torch.distributed.all_reduce(sums, group=group, async_op=True)

        def of_this_microbatch() -> Tensor:
            if work is not None:
                work.wait()
            importance_H = sums[:-2] / sums[-2]
            loss = head_balance_loss(importance_H, 1.0, self.routed)
            self._statistics.heads.record_loss(self.layer, self._first, loss)
            gradient_H = head_balance_gradient(importance_H, 1.0, self.routed)
            gradient_h = own_heads(gradient_H, self.tp_group)
            if in_row is not None and self.options.head_balance_scope == "data-parallel":
                gradient_h = gradient_h * (in_row / (sums[-2] / replicas * self.cp_size))
            return gradient_h if targets is None else gradient_h * (sums[-1] / replicas)

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


attach_gradient: Callable[[Tensor, Tensor, Callable[[], Tensor | None]], Tensor]
"""Return the output unchanged; its backward pass adds the function's gradient to the gates."""
attach_gradient = _AttachGradient.apply


def own_heads(importance_H: Tensor, tp_group: ProcessGroup) -> Tensor:
    """Return this rank's slice [h] of a tensor [H] over all heads."""
    count = importance_H.shape[-1] // tp_group.size()
    return importance_H.narrow(-1, tp_group.rank() * count, count)
