"""What a LoRA run trains, saves and loads: the adapter alone."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megasink.attention.variants import parameter_names
from megasink.lora.targets import is_of_adapter, is_trained

_HEAD_STATE = ".head_counter."


def freeze_base(model: GPTModel) -> None:
    """Freeze everything but the adapter, and reduce the model's checkpoints to what is trained.

    Call it before Megatron wraps the model: frozen parameters then get neither a gradient buffer
    nor an optimizer state. The state of the head-balance loss is saved too.

    Args:
        model: a stage whose linear layers have adapters.
    """
    for name, parameter in model.named_parameters():
        train = model.config.lora_train or ()
        parameter.requires_grad_(is_trained(name, train, parameter_names()))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole = model.sharded_state_dict

    def sharded_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        state = whole(*args, **kwargs)
        return {k: v for k, v in state.items() if k in trained or _HEAD_STATE in k}

    def expect_no_more(_: Any, keys: Any) -> None:
        keys.missing_keys[:] = [k for k in keys.missing_keys if k in trained or _HEAD_STATE in k]

    model.sharded_state_dict = sharded_state_dict
    model.register_load_state_dict_post_hook(expect_no_more)
    if model.pre_process and model.config.recompute_granularity == "full":
        model.embedding.register_forward_hook(_with_gradient)


def _with_gradient(embedding: Any, inputs: Any, embedded: Tensor) -> Tensor:
    """Make a frozen embedding's output need a gradient.

    A recomputed layer gets gradients for its parameters only if an input needs one
    (megatron/core/tensor_parallel/random.py:CheckpointFunction).
    """
    return embedded.requires_grad_() if torch.is_grad_enabled() else embedded


def base_state(model: GPTModel) -> dict[str, Any]:
    """Return the sharded state of the base's weights, for loading them.

    The head-balance loss starts anew.
    """
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = type(model).sharded_state_dict(model, metadata=groups)
    return {k: v for k, v in state.items() if not is_of_adapter(k) and _HEAD_STATE not in k}
