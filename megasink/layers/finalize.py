"""What ends the backward pass of a step: Megatron's reduction of gradients, and ours of gates."""

from typing import Any

from megatron.core.distributed import finalize_model_grads as finalize_upstream
from megatron.core.utils import get_model_config


def finalize_model_grads(model: list[Any], *args: Any, **kwargs: Any) -> None:
    """Megatron's ``config.finalize_model_grads_func``, arguments as upstream's.

    The sums of the gates go first: they are on their way while gradients are reduced and the
    optimizer steps.
    """
    get_model_config(model[0]).statistics.heads.start_reduction()
    finalize_upstream(model, *args, **kwargs)
