"""Parameters and base classes for per-head modules, with the attributes Megatron needs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from megasink.megatron.config import MegasinkTransformerConfig


def new_parameter(
    shape: tuple[int, ...],
    value: float,
    config: "MegasinkTransformerConfig",
    *,
    axis: int | None = None,
    of_tokens: bool = False,
) -> torch.nn.Parameter:
    """Create a parameter of the model's dtype with a constant initial value."""
    # Unlike Megatron, which always uses the current CUDA device, honor CPU initialization.
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = torch.nn.Parameter(
        torch.full(shape, value, dtype=config.params_dtype, device=device)
    )
    if axis is not None:
        set_tensor_model_parallel_attributes(parameter, True, axis, 1)
    if of_tokens:  # finalize_model_grads sums the gradients
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


def widened(parameter: Tensor) -> Tensor:
    """Return a parameter in float32, or unchanged if it is wider.

    Megatron's optimizers save and number float32 parameters of a bf16 model wrongly
    (core/optimizer/optimizer.py:sharded_state_dict,
    distrib_optimizer.py:_build_model_and_main_param_groups). The main weights are float32.
    """
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32))


class ShardedByHeads(torch.nn.Module):
    """A module whose checkpoint records which tensors are sharded, and on which axis.

    It reads the attributes set by ``set_tensor_model_parallel_attributes``, without which the
    gradient norm would only count the heads of tensor-parallel rank 0.
    """

    tp_group: ProcessGroup

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the sharded state; tensors without the attributes are replicated."""
        state = self.state_dict(prefix="", keep_vars=True)
        by_heads = {
            name: tensor.partition_dim
            for name, tensor in state.items()
            if getattr(tensor, "tensor_model_parallel", False)
        }
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            by_heads,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class StaysFloat32(torch.nn.Module):
    """A module whose own float32 buffers change device but never dtype.

    Float16Module would convert every buffer to bf16.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        own = self._buffers.items()
        kept = {name: t.data for name, t in own if t is not None and t.dtype == torch.float}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            tensor = getattr(self, name)
            tensor.data = tensor.data.float() if before.is_meta else before.to(tensor.device)
        return self
