"""From the gates of one layer to its head importance, its statistics and its balance gradient.

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
        config: with ``head_balance_coeff``, ``head_balance_scope``, ``head_balance_shared_heads``
            and ``head_balance_shared_refresh``.
        layer_number: 1-based index in the whole model.
        tp_group: tensor-parallel group.
        cp_size: how many context-parallel ranks share the tokens of a microbatch.

    Attributes:
        coefficients: [H] float32, dL/dImp at coefficient 1 from the importance of the last step's
            global batch (scope global); 0 before the first. Part of the checkpoint, so that a
            resumed run goes on to the bit; a checkpoint of Megatron's own has none of this state,
            and it starts anew.
        routed: [H] bool, the heads that the loss evens out (P0.15); none before the first step
            where some are shared, all where none is.
        steps: how many steps `routed` has been in use.
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
        # Not the attention's own config: Megatron gives it another one where groups < ranks.
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

    def forward(
        self, out_SBX: Tensor, gate_BHTC: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Record the importance of the layer's heads; attach the gradient of the balance loss.

        To be called where ``self.training and torch.is_grad_enabled()`` only: recompute runs
        forward a first time without gradients, and that run counts nothing.

        Args:
            out_SBX: the output that the gate belongs to; its backward runs that of the loss.
            gate_BHTC: gates of this rank's heads, in [0, 1], whose mean over C is that of the
                token; differentiable where the loss is on.
            documents: of a packed batch, whose padding does not count.

        Returns:
            a tensor equal to `out_SBX`.
        """
        config, statistics = self.config, self._statistics
        batch, _, tokens, width = gate_BHTC.shape
        tokens, real_1T = batch * tokens, None
        if documents is not None:
            tokens, real_1T = documents.real_tokens, documents.real_1T
        gate_sum_h = gate_sum(gate_BHTC[..., 0] if width == 1 else gate_BHTC.mean(-1), real_1T)
        statistics.heads.record(
            self.layer, self._first, gate_sum_h, tokens, self.routed, self._receive
        )
        if not config.head_balance_coeff:
            return out_SBX
        coefficients = self._coefficients(gate_sum_h, tokens)
        # This rank's share of the microbatch's importance: Megatron adds up those of the
        # context-parallel ranks, or averages them and has their number in its scale.
        count = tokens * self.cp_size
        slope_h = None
        if self._observer.compares_gradients:
            slope_h = gate_sum(gate_slope(gate_BHTC), real_1T) / count

        def gradient() -> Tensor:
            sent_h = statistics.balance.scaled(coefficients(), config.head_balance_coeff)
            if slope_h is not None:
                self._observer.add(BALANCE_GRADIENT, sent_h * slope_h, tokens)
            return sent_h

        return attach_gradient(out_SBX, gate_sum_h / count, gradient)

    def _coefficients(self, gate_sum_h: Tensor, tokens: int) -> Callable[[], Tensor]:
        """What gives dL/dImp [h] at coefficient 1 in the backward pass.

        Under ``calculate_per_token_loss`` times the targets of the microbatch, since Megatron
        divides every gradient by those of the global batch: a microbatch weighs with its targets,
        as it does in the loss of the language model.
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
            return gradient_h if targets is None else gradient_h * sums.mean_targets()

        return of_this_microbatch

    def _group(self) -> ProcessGroup:
        """The ranks whose tokens count together."""
        if self.config.head_balance_scope == "data-parallel":
            return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return parallel_state.get_tensor_and_context_parallel_group()

    def _receive(self, importance_H: Tensor) -> None:
        """When a step has ended: its importance over the global batch."""
        shared = self.config.head_balance_shared_heads
        refresh = self.config.head_balance_shared_refresh
        if shared:
            # Without a look at the device: the first step chooses, and each refresh-th one.
            due = self.steps == 0
            if refresh:
                due = self.steps % refresh == 0
            self.routed = torch.where(due, routed_heads(importance_H, shared), self.routed)
        self.steps += 1
        self.coefficients = head_balance_gradient(importance_H, 1.0, self.routed)
