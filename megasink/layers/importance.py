"""Head importance, statistics and balance gradient from the gates of one layer.

Shapes: S sequence, B batch, H query heads of the layer, h those of this tensor-parallel rank,
T = S tokens, C gates per head and token, 1 or the head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.attention import gate_slope, gate_sum
from megasink.balance.attach import attach_gradient
from megasink.balance.loss import head_balance_gradient, head_balance_loss, routed_heads
from megasink.balance.reduce import ImportanceSum, own_heads
from megasink.balance.tracker import BALANCE_GRADIENT
from megasink.layers.documents import Documents
from megasink.layers.head_observer import HeadObserver
from megasink.layers.parameters import StaysFloat32
from megasink.layers.transformer_config import MegasinkTransformerConfig


class HeadCounter(StaysFloat32):
    """Counts the gates of one layer and attaches the gradient of the head-balance loss.

    Args:
        config: Config with ``head_balance_coeff``, ``head_balance_scope``,
            ``head_balance_shared_heads`` and ``head_balance_shared_refresh``.
        layer_number: 1-based index in the whole model.
        tp_group: Tensor-parallel group.
        cp_size: Number of context-parallel ranks that share the tokens of a microbatch.

    Attributes:
        coefficients: [H] float32, dL/dImp at coefficient 1 from the importance of the previous
            step's global batch (scope global); 0 before the first step. Saved in checkpoints, so
            that resumed runs are bit-exact; missing from Megatron's own checkpoints, which start
            with the initial state.
        routed: [H] bool, the heads covered by the loss (P0.15): all heads without sharing; with
            sharing, none before the first step.
        steps: Number of completed steps.
    """

    coefficients: Tensor
    routed: Tensor
    steps: Tensor

    def __init__(
        self,
        config: MegasinkTransformerConfig,
        layer_number: int,
        tp_group: ProcessGroup,
        cp_size: int = 1,
    ):
        super().__init__()
        self.config = config
        self._statistics = config.statistics
        self._observer = HeadObserver(config, layer_number, tp_group.rank())
        self.layer = layer_number - 1
        self.tp_group = tp_group
        self.cp_size = cp_size
        # Not the config of the attention layer: Megatron changes it if groups < ranks.
        heads = config.num_attention_heads
        self._first = heads // tp_group.size() * tp_group.rank()  # of this rank's heads
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.register_buffer("coefficients", torch.zeros(heads, device=device))
        shares = config.head_balance_shared_heads > 0
        self.register_buffer("routed", torch.full((heads,), not shares, device=device))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64, device=device))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name, buffer in self.named_buffers():
            state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # Its counts are Python's, which a compiled graph would take for constants.
    @torch.compiler.disable
    def forward(
        self, out_SBX: Tensor, gate_BHTC: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Record the importance of the layer's heads and attach the gradient of the balance loss.

        Call it only if ``self.training and torch.is_grad_enabled()``: the first forward of
        activation recompute has no gradients and must not be counted.

        Args:
            out_SBX: Output of the gated heads; its backward also runs that of the loss.
            gate_BHTC: Gates of this rank's heads, in [0, 1]; a token's gate is the mean over C.
                Differentiable if the loss is on.
            documents: Documents of a packed batch, whose padding is not counted.

        Returns:
            A tensor equal to `out_SBX`.
        """
        config, statistics = self.config, self._statistics
        batch, _, tokens, width = gate_BHTC.shape
        tokens, real_1T = batch * tokens, None
        # Tokens of the microbatch, on all context-parallel ranks.
        count = tokens * self.cp_size
        if documents is not None:
            tokens, real_1T = documents.real_tokens, documents.real_1T
            count = documents.real_in_row
        gate_sum_h = gate_sum(gate_BHTC.squeeze(-1) if width == 1 else gate_BHTC.mean(-1), real_1T)
        statistics.heads.record(
            self.layer, self._first, gate_sum_h, tokens, self.routed, self._receive
        )
        if not config.head_balance_coeff:
            return out_SBX
        uneven = count if documents is not None else None
        coefficients = self._coefficients(gate_sum_h, tokens, uneven)
        # This rank's share of the microbatch's importance: Megatron sums over context-parallel
        # ranks, or averages and includes their number in the loss scale. The gradient is divided,
        # not the sum: one launch per layer less.
        slope_h = None
        if self._observer.compares_gradients:
            slope_h = gate_sum(gate_slope(gate_BHTC), real_1T) / count

        def gradient() -> Tensor:
            sent_h = statistics.balance.scaled(coefficients(), config.head_balance_coeff)
            if slope_h is not None:
                self._observer.add(BALANCE_GRADIENT, sent_h * slope_h, tokens)
            return sent_h / count

        return attach_gradient(out_SBX, gate_sum_h, gradient)

    def _coefficients(
        self, gate_sum_h: Tensor, tokens: int, uneven: int | None
    ) -> Callable[[], Tensor]:
        """Return a function that computes dL/dImp [h] at coefficient 1 in the backward pass.

        In the scope of several replicas, whose packed rows may have `uneven` numbers of tokens, it
        is multiplied by this microbatch's share of the tokens over that of an even split.

        Under ``calculate_per_token_loss`` the result is multiplied by the targets of the
        microbatch, because Megatron divides every gradient by the targets of the global batch: a
        microbatch is weighted by its targets, as in the language-model loss.
        """
        per_token = self.config.calculate_per_token_loss
        targets = self._statistics.balance.targets if per_token else None
        if self.config.head_balance_scope == "global":
            of_last_step_h = own_heads(self.coefficients, self.tp_group)
            return lambda: of_last_step_h if targets is None else of_last_step_h * targets
        sums = ImportanceSum(gate_sum_h, tokens, self.tp_group, self._group(), targets)

        def of_this_microbatch() -> Tensor:
            importance_H = sums.importance()
            loss = head_balance_loss(importance_H, 1.0, self.routed)
            self._statistics.heads.record_loss(self.layer, self._first, loss)
            gradient_H = head_balance_gradient(importance_H, 1.0, self.routed)
            gradient_h = own_heads(gradient_H, self.tp_group)
            if uneven is not None and self.config.head_balance_scope == "data-parallel":
                gradient_h = gradient_h * (uneven / (sums.mean_tokens() * self.cp_size))
            return gradient_h if targets is None else gradient_h * sums.mean_targets()

        return of_this_microbatch

    def _group(self) -> ProcessGroup:
        """Return the ranks over whose tokens the importance is averaged."""
        if self.config.head_balance_scope == "data-parallel":
            return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return parallel_state.get_tensor_and_context_parallel_group()

    def _receive(self, importance_H: Tensor, gradient_H: Tensor) -> None:
        """Receive the importance over the global batch at the end of a step.

        Args:
            gradient_H: dL/dImp at coefficient 1 over `routed`; a row of a tensor of all layers.
        """
        shared = self.config.head_balance_shared_heads
        refresh = self.config.head_balance_shared_refresh
        if shared:
            # Without a device sync: choose at the first step and every `refresh` steps.
            due = self.steps == 0
            if refresh:
                due = self.steps % refresh == 0
            self.routed = torch.where(due, routed_heads(importance_H, shared), self.routed)
            gradient_H = head_balance_gradient(importance_H, 1.0, self.routed)
        self.steps += 1
        self.coefficients = gradient_H.clone()  # else a checkpoint would hold every layer's
