"""Gate scores as extra rows at the end of linear_qkv: one GEMM, one gather of the sequence.

If TransformerEngine fuses the norm into linear_qkv, only that layer has the normed hidden state.
In memory a rank's weight is [its q, k, v rows | its gate rows | padding]. A checkpoint has the gate
rows as ``linear_gate.weight``: rows at the end of each shard would end up in the wrong heads when
the tensor-parallel size changes.

The padding makes the number of rows a multiple of 8, or of the 16 or 32 that the GEMMs of FP8 need.
Value is a view of the output, so that number is the distance between its rows, and flash kernels
load 16 bytes at once: on a GPU another distance ends in "misaligned address". The padding is 0, has
no gradient, and is in no torch_dist checkpoint.
"""

import functools
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.fp8_utils import get_fp8_align_size
from torch import Tensor

from megasink.attention.variants.gate_options import trailing_rows

_BF16_ROWS = 8  # fill 16 bytes


class GateRows:
    """Mixin for a column-parallel linear layer used as linear_qkv.

    `row_split` has the rows of ``weight`` (and of any ``bias``, which the gate then shares, as in
    Megatron's own output gate): of this rank's query, key and value; of its gate; and of padding.
    `part` replaces "linear_qkv." in the checkpoint's name of the second.
    """

    part = "linear_gate."

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any):
        ranks = config.tensor_model_parallel_size
        mixed, gate = output_size // ranks, self.rows(config) // ranks
        multiple = get_fp8_align_size(config.fp8_recipe) if config.fp8 else _BF16_ROWS
        self.row_split = (mixed, gate, -(mixed + gate) % multiple)
        super().__init__(input_size, ranks * sum(self.row_split), config=config, **kwargs)  # type: ignore[call-arg]
        self._scores: Tensor | None = None
        for parameter in (self.weight, self.bias):  # type: ignore[attr-defined]
            if parameter is not None and parameter.numel():
                parameter.row_split, parameter.row_part = self.row_split, self.part
                parameter.data[mixed + gate :] = 0.0

    def rows(self, config: Any) -> int:
        """Return the gate rows of all tensor-parallel ranks."""
        return trailing_rows(config)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run the layer; return the output without the gate rows, kept for `take_scores`."""
        output, bias = super().forward(*args, **kwargs)  # type: ignore[misc]
        mixed_qkv, self._scores, _ = output.split(self.row_split, dim=-1)
        return mixed_qkv, bias

    def take_scores(self) -> Tensor:
        """Return and clear the scores [S, B, gate rows of this rank] of the last forward call."""
        scores, self._scores = self._scores, None
        assert scores is not None
        return scores

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the sharded state: a separate ``linear_gate``, and no padding."""
        from megasink.megatron.checkpoint_parts import two_tensors

        state: ShardedStateDict = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        for name in ("weight", "bias"):
            projection = state.get(f"{prefix}{name}")
            if isinstance(projection, ShardedTensor):
                state[f"{prefix}{name}"] = two_tensors(projection, self.row_split, self.part)
        return state


@functools.cache
def with_gate_rows(linear: type, rows: type = GateRows) -> type:
    """Return the column-parallel class (Megatron's or TransformerEngine's) with trailing rows."""
    return type(f"{rows.__name__}{linear.__name__}", (rows, linear), {"__module__": __name__})
