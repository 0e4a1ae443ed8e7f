"""The end of a backward pass: Megatron's gradient reduction and megasink's gate reduction."""

from typing import Any

from megatron.core.distributed import finalize_model_grads as finalize_upstream
from megatron.core.utils import get_model_config


def finalize_model_grads(model: list[Any], *args: Any, **kwargs: Any) -> None:
    """Implement Megatron's ``config.finalize_model_grads_func``, with the same arguments.

    The all-reduce of the gate sums starts first, so it overlaps with the gradient reduction and
    the optimizer step.
    """
    get_model_config(model[0]).statistics.heads.start_reduction()
    finalize_upstream(model, *args, **kwargs)
