"""Head importance and balance gradient from the gates of one layer in Megatron.

Shapes: S sequence, B batch, H query heads of the layer, h those of this tensor-parallel rank, T = S
tokens, C gates per head and token, 1 or D.
"""

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import get_process_group_ranks as ranks_of

from megasink.attention import gate_sum
from megasink.balance.layer_loss import LayerBalance
from megasink.megatron.parameters import StaysFloat32

if TYPE_CHECKING:
    from megasink.megatron.config import MegasinkTransformerConfig
    from megasink.megatron.microbatch_documents import Documents


class MegatronLayerBalance(StaysFloat32, LayerBalance):
    """Counts the gates of one layer and attaches the gradient of the head-balance loss.

    Its state is missing from Megatron's own checkpoints, which start with the initial one.
    """

    def __init__(
        self,
        config: "MegasinkTransformerConfig",
        layer_number: int,
        tp_group: ProcessGroup,
        cp_size: int = 1,
        groups: ProcessGroupCollection | None = None,
    ):
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        # Heads not of the config of the attention layer: Megatron changes it if groups < ranks.
        super().__init__(
            config,
            config.statistics,
            layer_number - 1,
            config.num_attention_heads,
            tp_group,
            cp_size,
            device,
        )
        self.config, self._groups = config, groups

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name, buffer in self.named_buffers():
            state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # Its counts are Python's, which a compiled graph would take for constants.
    @torch.compiler.disable
    def forward(
        self,
        out_SBX: Tensor,
        gate_BHTC: Tensor,
        documents: "Documents | None" = None,
        every_BHTC: Tensor | None = None,
    ) -> Tensor:
        """Record the importance of the layer's heads and attach the gradient of the balance loss.

        Call it only if ``self.training and torch.is_grad_enabled()``: the first forward of
        activation recompute has no gradients and must not be counted.
        """
        batch, _, length, width = gate_BHTC.shape
        tokens, in_row, real_BT = batch * length, None, None
        if documents is not None:
            tokens, real_BT = documents.real_tokens, documents.real_1T
            in_row = documents.real_in_row
        elif (real := self._statistics.factors.real) is not None:
            if real.mask_BT.shape != (batch, length):
                raise RuntimeError(
                    f"set_real_tokens got a mask {list(real.mask_BT.shape)}, but the layer's "
                    f"input has shape {[batch, length]} (rows, tokens)"
                )
            tokens, real_BT = real.here, real.mask_BT.to(gate_BHTC.device)
            in_row = max(1, real.in_row)
        gate_sum_h = gate_sum(gate_BHTC.squeeze(-1) if width == 1 else gate_BHTC.mean(-1), real_BT)
        observe = None
        if self.config.head_balance_coeff > 0 and self._statistics.heads.observes:
            from megasink.megatron.head_observer import HeadObserver

            every_BHTC = gate_BHTC if every_BHTC is None else every_BHTC
            observer = HeadObserver(self.config, self.layer + 1, self.tp_group.rank())
            count = tokens * self.cp_size if in_row is None else in_row
            observe = observer.balance_gradient(every_BHTC, real_BT, count, tokens)
        return self.attach(out_SBX, gate_sum_h, tokens, observe, in_row)

    def targets(self) -> Tensor | None:
        """Under ``calculate_per_token_loss`` Megatron divides gradients by the global targets."""
        if not self.config.calculate_per_token_loss:
            return None
        return self._statistics.factors.targets

    def importance_group(self) -> ProcessGroup:
        """Tensor- and context-parallel ranks; in the scope "data-parallel" also the replicas."""
        name = "tp_dp_cp" if self.config.head_balance_scope == "data-parallel" else "tp_cp"
        group: ProcessGroup | None = getattr(self._groups, name, None)
        if group is None:
            group = getattr(ProcessGroupCollection.use_mpu_process_groups([name]), name)
        ours = self._statistics.heads.group
        if ours is not None and not {*ranks_of(group)} <= {*ranks_of(ours)}:
            raise RuntimeError(
                f"the ranks {ranks_of(group)} would share importances, but the HeadBalance has the "
                f"group {ranks_of(ours)}: use a pg_collection whose {name} is within that group"
            )
        return group
