"""Megatron's tensor-parallel linear layers with LoRA beside their frozen weight.

The rank-r intermediate z = A x is small, so it is what crosses between tensor-parallel ranks:

- column-parallel (linear_qkv, linear_fc1): A is replicated, B sharded by rows. Under sequence
  parallelism each rank has z of its own tokens, gathered before B; otherwise z is the same
  everywhere, and the gradients of the ranks' rows are summed.
- row-parallel (linear_proj, linear_fc2): A is sharded by columns, B replicated. z is reduced as the
  output of the layer is: summed, or summed and scattered along the sequence.

A replicated matrix that sees only a rank's tokens has the attribute ``sequence_parallel``, so that
Megatron sums its gradient over the ranks.

Shapes: S sequence, B batch, I and O inputs and outputs, r rank; N targets of a layer, R = N * r.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.attention.variants.gates import is_megatrons_output_gate, trailing_rows
from megasink.lora.merge import Sizes, by_group
from megasink.lora.targets import FC1, GATE, LINEARS, QKV, scaling_of, targets_of
from megasink.megatron.config import MegasinkTransformerConfig
from megasink.megatron.parameters import ShardedByHeads, new_parameter

_Pairs = dict[str, tuple[Tensor, Tensor]]  # {target: (A, B)}


class LowRank(ShardedByHeads):
    """The matrices A and B of one target.

    Args:
        inputs, outputs: I and O of this tensor-parallel rank.
        column: whether the layer is column-parallel, which shards B; else it shards A.

    Attributes:
        lora_A: [r, I], uniform in +-1/sqrt(I of all ranks) as in peft (kaiming_uniform_ with
            a = sqrt(5)); drawn by `initialize_weights`.
        lora_B: [O, r], initially 0.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        config: MegasinkTransformerConfig,
        tp_group: ProcessGroup,
        *,
        column: bool,
    ):
        super().__init__()
        self.tp_group = tp_group
        rank = config.lora_rank
        self.lora_A = new_parameter((rank, inputs), 0.0, config, sharded=False)
        self.lora_B = new_parameter((outputs, rank), 0.0, config, sharded=column)
        if not column:
            self.lora_A.sequence_parallel = False  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(self.lora_A, True, 1, 1)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return A and B. Under --overlap-param-gather, a hook of this call waits for them."""
        return self.lora_A, self.lora_B


class GateChange(ShardedByHeads):
    """What is added to the gate rows of linear_qkv, whose other rows are frozen.

    Attributes:
        weight: [rows of this rank, I], initially 0.
        bias: [rows of this rank]; None if linear_qkv has no bias.
    """

    def __init__(
        self,
        rows: int,
        inputs: int,
        config: MegasinkTransformerConfig,
        tp_group: ProcessGroup,
        *,
        bias: bool,
    ):
        super().__init__()
        self.tp_group = tp_group
        self.weight = new_parameter((rows, inputs), 0.0, config, sharded=True)
        self.bias = new_parameter((rows,), 0.0, config, sharded=True) if bias else None

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias; see `LowRank.forward`."""
        return self.weight, self.bias


class _Adapted:
    """Mixin for a linear layer: adds alpha / r B A x of its targets to the output.

    Attributes:
        lora: {target: LowRank}, and GateChange under the name `GATE`.
    """

    linear = ""  # the key of LINEARS
    column = True

    def __init__(self, *args: Any, config: Any, **kwargs: Any):
        super().__init__(*args, config=config, **kwargs)  # type: ignore[call-arg]
        self._options = config
        self._scaling = scaling_of(config.lora_rank, config.lora_alpha)
        targets = targets_of(config, gated_unit=config.gated_linear_unit)
        self._targets = [name for name in LINEARS[self.linear] if name in targets]
        self.lora = torch.nn.ModuleDict()
        group: ProcessGroup = self.tp_group  # type: ignore[attr-defined]
        self._rows = self._rows_of_rank(config, group.size())
        inputs = self.input_size if self.column else self.input_size_per_partition  # type: ignore[attr-defined]
        for name in self._targets:
            rows = self._rows[name]
            self.lora[name] = LowRank(inputs, rows, config, group, column=self.column)
        if rows := self._gate_rows(config, group.size()):
            bias = self.bias is not None and self.bias.numel() > 0  # type: ignore[attr-defined]
            self.lora[GATE] = GateChange(rows, inputs, config, group, bias=bias)

    def _rows_of_rank(self, config: Any, ranks: int) -> dict[str, int]:
        """Return the outputs of this rank by part, in their order in the layer's output."""
        if self.linear == QKV:
            return {name: rows // ranks for name, rows in sizes_of(config).qkv_rows().items()}
        if not self.column:
            return {LINEARS[self.linear][0]: self.output_size}  # type: ignore[attr-defined]
        names = LINEARS[FC1] if config.gated_linear_unit else LINEARS[FC1][1:]
        rows = self.output_size_per_partition // len(names)  # type: ignore[attr-defined]
        return dict.fromkeys(names, rows)

    def _gate_rows(self, config: Any, ranks: int) -> int:
        if self.linear != QKV or "gates" not in (config.lora_train or ()):
            return 0
        return self._rows.get(GATE, trailing_rows(config) // ranks)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run the layer and add what the adapter does to its input."""
        output, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        if self._targets:
            pairs = {name: self.lora[name]() for name in self._targets}
            change = self._column(input_, pairs) if self.column else self._row(input_, pairs)
            # In place: no gradient needs the product, which is as large as the output.
            output = change.add_(output)
        if GATE in self.lora:
            output = self._change_gate(input_, output)
        return output, bias

    def _column(self, x_SBI: Tensor, pairs: _Pairs) -> Tensor:
        sharded = self.sequence_parallel  # type: ignore[attr-defined]
        z_SBR = self._down(x_SBI, pairs, sharded=sharded)
        z_SBR = self._complete(z_SBR)
        # One block-diagonal matrix: the wasted products with its zeros cost less than to write each
        # target's part of the output apart and then together.
        blocks = (
            pairs[name][1] if name in pairs else z_SBR.new_empty(rows, 0)
            for name, rows in self._rows.items()
        )
        up_OR = torch.block_diag(*blocks)
        if self.linear == QKV:
            parts = up_OR.split(list(self._rows.values()))
            groups = sizes_of(self._options).groups // self.tp_group.size()  # type: ignore[attr-defined]
            up_OR = by_group(parts, groups)
        return F.linear(z_SBR, up_OR)

    def _row(self, x_SBI: Tensor, pairs: _Pairs) -> Tensor:
        z_SBR = self._down(x_SBI, pairs, sharded=True)
        group = self.tp_group  # type: ignore[attr-defined]
        if self.sequence_parallel:  # type: ignore[attr-defined]
            z_SBR = reduce_scatter_to_sequence_parallel_region(z_SBR, group=group)
        else:
            z_SBR = reduce_from_tensor_model_parallel_region(z_SBR, group=group)
        return F.linear(z_SBR, pairs[self._targets[0]][1])

    def _down(self, x_SBI: Tensor, pairs: _Pairs, *, sharded: bool) -> Tensor:
        """Return alpha / r A x [S, B, R] of all targets; each has its own dropout, as in peft.

        Args:
            sharded: whether the tensor-parallel ranks have different parts of x.
        """
        down = [down for down, _ in pairs.values()]
        chance = self._options.lora_dropout
        if not chance or not self.training:  # type: ignore[attr-defined]
            return F.linear(x_SBI, torch.cat(down)) * self._scaling
        parts = [F.linear(_dropped(x_SBI, chance, sharded), matrix) for matrix in down]
        return torch.cat(parts, dim=-1) * self._scaling

    def _complete(self, local: Tensor) -> Tensor:
        """Return the whole sequence; the gradients of the ranks' rows are summed."""
        group = self.tp_group  # type: ignore[attr-defined]
        if self.sequence_parallel:  # type: ignore[attr-defined]
            whole: Tensor = gather_from_sequence_parallel_region(
                local, tensor_parallel_output_grad=True, group=group
            )
            return whole
        same: Tensor = copy_to_tensor_model_parallel_region(local, group=group)
        return same

    def _change_gate(self, input_: Tensor, output: Tensor) -> Tensor:
        change = F.linear(self._complete(input_), *self.lora[GATE]())
        if GATE not in self._rows:  # the layer keeps the scores of its trailing rows
            self._scores = self._scores + change  # type: ignore[has-type]
            return output
        groups = sizes_of(self._options).groups // self.tp_group.size()  # type: ignore[attr-defined]
        parts = [
            change if name == GATE else change.new_zeros(*change.shape[:2], rows)
            for name, rows in self._rows.items()
        ]
        by_rows = by_group([part.movedim(-1, 0) for part in parts], groups)
        return output + by_rows.movedim(0, -1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the sharded state of the layer and of its adapter."""
        whole: ShardedStateDict = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        at = f"{prefix}lora."
        # The layer does not know how the adapter is sharded.
        state = {key: value for key, value in whole.items() if not key.startswith(at)}
        for name, module in self.lora.items():
            state |= module.sharded_state_dict(f"{at}{name}.", sharded_offsets, metadata)  # type: ignore[operator]
        return state


@functools.cache
def with_adapter(layer: type, linear: str) -> type:
    """Return a tensor-parallel linear class with LoRA.

    Args:
        layer: Megatron's class, or that of `with_gate_rows`.
        linear: the key of `LINEARS`.
    """
    column = linear in (QKV, FC1)
    attributes = {"__module__": __name__, "linear": linear, "column": column}
    return type(f"Adapted{layer.__name__}", (_Adapted, layer), attributes)


def sizes_of(config: Any) -> Sizes:
    """Return what the order of linear_qkv's rows depends on, from a transformer config."""
    groups = config.num_query_groups
    queries = config.num_attention_heads // groups
    return Sizes(groups, queries, config.kv_channels, is_megatrons_output_gate(config))


def _dropped(x: Tensor, chance: float, sharded: bool) -> Tensor:
    if not sharded:  # the same on every rank
        return F.dropout(x, chance)
    with get_cuda_rng_tracker().fork():
        return F.dropout(x, chance)
