"""What ends the backward pass of a step: Megatron's reduction of gradients, and ours of gates."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads as finalize_upstream
from megatron.core.utils import get_model_config


def finalize_model_grads(model: list[Any], *args: Any, **kwargs: Any) -> None:
    """Megatron's ``config.finalize_model_grads_func``, arguments as upstream's.

    The sums of the gates go first: they are on their way while gradients are reduced and the
    optimizer steps.
    """
    statistics = get_model_config(model[0]).statistics
    statistics.heads.start_reduction(parallel_state.get_tensor_model_parallel_group())
    finalize_upstream(model, *args, **kwargs)
