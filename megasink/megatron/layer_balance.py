"""Head importance, statistics and balance gradient from the gates of one layer in Megatron.

Observing changes nothing that the layer computes: gradients are read by hooks, and all data stays
on the device.

Shapes: S sequence, B batch, H query heads of the layer (in an observer those of this rank, or the
groups of a key or value gate), h those of this tensor-parallel rank, G key/value groups, T = S
tokens, D head dim, C gates per head and token, 1 or D, s tokens of this context-parallel rank.
"""

import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import get_process_group_ranks as ranks_of

from megasink.attention import gate_sum
from megasink.attention.constants import SINK_TOKENS
from megasink.balance.gate_sums import BALANCE_GRADIENT, GATE, OTHER_GRADIENT
from megasink.balance.layer_loss import LayerBalance
from megasink.megatron.parameters import StaysFloat32

if TYPE_CHECKING:
    from megasink.megatron.config import MegasinkTransformerConfig
    from megasink.megatron.microbatch_documents import Documents


class HeadObserver:
    """Records statistics of one layer on observed steps and in evaluations."""

    def __init__(self, config: "MegasinkTransformerConfig", layer_number: int, rank: int):
        self._statistics = config.statistics
        self._balances = config.head_balance_coeff > 0
        self._layer = layer_number - 1
        self._rank = rank

    @property
    def observes(self) -> bool:
        """Whether the current step is observed."""
        return self._statistics.heads.observes

    @property
    def compares_gradients(self) -> bool:
        """Whether the current step records the gradients at the gates."""
        return self.observes and self._balances

    @property
    def counts_sinks(self) -> bool:
        """Whether a running evaluation counts attention sinks."""
        return self._statistics.sinks is not None

    def add(self, name: str, sum_H: Tensor, weight: int, *, replicated: bool = False) -> None:
        """Add to a series of an observed step; `replicated` heads are those of every TP rank."""
        if self.observes:
            first = 0 if replicated else len(sum_H) * self._rank
            self._statistics.heads.add(name, self._layer, first, sum_H, weight)

    def explicit_gate(self, gate_SBHC: Tensor, *, replicated: bool) -> None:
        """Record the mean of a gate that is not the head importance; `replicated` as in `add`."""
        if self.observes and torch.is_grad_enabled():
            sequence, batch, _, width = gate_SBHC.shape
            sum_H = gate_SBHC.detach().sum((0, 1, 3)) / width
            self.add(GATE, sum_H, sequence * batch, replicated=replicated)

    def output_gradient(
        self,
        out_BHTD: Tensor,
        gate_BHTC: Tensor,
        value_BHTD: Tensor | None = None,
        counted: int | None = None,
    ) -> None:
        """Record in the backward pass the gradient that reaches the gate logit through the output.

        Call it only if `compares_gradients`.
        """
        from megasink.attention import gate_bias_gradient

        batch, _, tokens, _ = out_BHTD.shape
        count = batch * tokens if counted is None else counted
        kept_BHTD, gate_BHTC = out_BHTD.detach(), gate_BHTC.detach()

        def record(grad_BHTD: Tensor) -> None:
            sum_H = gate_bias_gradient(grad_BHTD, kept_BHTD, gate_BHTC, value_BHTD)
            self.add(OTHER_GRADIENT, sum_H, count)

        out_BHTD.register_hook(record)

    def count_sinks(self, first_BH: Tensor, slot_gate_BHT: Tensor | None = None) -> None:
        """Count the sinks of a microbatch, by the share of key 0; call it if `counts_sinks`."""
        slot_BH = None if slot_gate_BHT is None else 1.0 - slot_gate_BHT[..., :SINK_TOKENS].mean(-1)
        first = first_BH.shape[1] * self._rank
        self._statistics.sinks.record(self._layer, first, first_BH, slot_BH)


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
        self._observer = HeadObserver(config, layer_number, tp_group.rank())

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
        tokens, real_BT = batch * length, None
        # Tokens of the microbatch, on all context-parallel ranks.
        count = tokens * self.cp_size
        in_row = None
        if documents is not None:
            tokens, real_BT = documents.real_tokens, documents.real_1T
            count = in_row = documents.real_in_row
        elif (real := self._statistics.factors.real) is not None:
            if real.mask_BT.shape != (batch, length):
                raise RuntimeError(
                    f"set_real_tokens got a mask {list(real.mask_BT.shape)}, but layers here "
                    f"have shape {[batch, length]} (rows, tokens)"
                )
            tokens, real_BT = real.here, real.mask_BT.to(gate_BHTC.device)
            count = in_row = max(1, real.in_row)
        gate_sum_h = gate_sum(gate_BHTC.squeeze(-1) if width == 1 else gate_BHTC.mean(-1), real_BT)
        observe = None
        if self._observer.compares_gradients:
            from megasink.attention import gate_slope

            every_BHTC = gate_BHTC if every_BHTC is None else every_BHTC
            slope_h = gate_sum(gate_slope(every_BHTC), real_BT) / count
            observe = partial(self._observe, slope_h, tokens)
        return self.attach(out_SBX, gate_sum_h, tokens, observe, in_row)

    def _observe(self, slope_h: Tensor, tokens: int, sent_h: Tensor) -> None:
        self._observer.add(BALANCE_GRADIENT, sent_h * slope_h, tokens)

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
                f"group {ranks_of(ours)}: give the model a pg_collection whose {name} is part of it"
            )
        return group


# Masks and batches that are checked, and equal tokens at the end of a row that are padding.
_CHECKED, _PADDING = 64, 8


def check_batch(core: Any, mask: Tensor | None, value_sBGD: Tensor, packed: Any) -> None:
    """Raise ValueError for a mask that is not causal; warn of padding; both wait for the device.

    Args:
        core: CoreAttention that was called with the others, in one of the first two steps.
    """
    statistics, group = core.config.statistics, core.cp_group
    seen = statistics.mask is not None and statistics.mask() is mask
    if mask is not None and not seen and statistics.masks < _CHECKED:
        statistics.mask, statistics.masks = weakref.ref(mask), statistics.masks + 1
        _refuse_other(mask, group)
    unmarked = statistics.may_pad and packed is None and statistics.factors.real is None
    # The values of a first layer are those of the tokens, and the sequence ends on rank 0.
    if unmarked and core.layer_number == 1 and group.rank() == 0:
        statistics.may_pad = not _warn_of_padding(value_sBGD)


def _refuse_other(mask: Tensor, group: ProcessGroup) -> None:
    columns = mask.shape[-1]
    causal_SS = torch.ones(columns, columns, dtype=torch.bool, device=mask.device).triu(1)
    if group.size() > 1:
        from megasink.megatron.context_parallel import own_chunks

        causal_SS = own_chunks(causal_SS, group.size(), group.rank())
    rows = mask.shape[-2]
    if rows > len(causal_SS) or not torch.equal(mask.bool(), causal_SS[:rows].expand_as(mask)):
        raise ValueError(
            f"an attention mask {list(mask.shape)} is not causal, and megasink's attention would "
            "ignore it: pass None, mark documents with packed_seq_params, and padding with "
            "set_real_tokens"
        )


def _warn_of_padding(value_sBGD: Tensor) -> bool:
    """Warn if a row ends with the same token so often that it is padding."""
    length = min(_PADDING, len(value_sBGD) // 4)
    end_sBGD = value_sBGD[len(value_sBGD) - length :]
    same_B = (end_sBGD == end_sBGD[-1:]).flatten(2).all(2).all(0)
    found = length > 1 and bool(same_B.any())
    if found:
        warnings.warn(
            f"{int(same_B.sum())} of {len(same_B)} rows end with {length} or more equal tokens, "
            "which count in the head importance: mark padding with set_real_tokens of the "
            "HeadBalance",
            stacklevel=2,
        )
    return found
