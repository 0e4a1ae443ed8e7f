"""What a rank has of the parameters of the whole model, for ``merging.whole``."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megasink.megatron.checkpoint_parts import named_parts
from megasink.megatron.initial_weights import global_names


def gather_gradients(models: list[Any]) -> None:
    """Complete the gradient buffers, of which the distributed optimizer reduces a part per rank."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    buffers = [(dense, b) for model in models for b in model.buffers]
    buffers += [(experts, b) for model in models for b in model.expert_parallel_buffers]
    for group, buffer in buffers:
        for bucket in buffer.buckets:
            mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, mine, group=group)


def shards(models: list[Any], attribute: str) -> dict[str, dict[str, Any]]:
    """{name in the whole model: this rank's part of each parameter}, for ``merging.whole``."""
    found = {}
    for model in unwrap_model(models):
        names = global_names(model)
        for name, parameter in model.named_parameters():
            if attribute != "data" and not parameter.requires_grad:
                continue  # frozen: there is no gradient
            values = getattr(parameter, attribute).detach().float().clone()
            # A GPTModel has another name for the norm after its last layer.
            whole = names[name].replace("final_layernorm", "final_norm")
            for part_name, part in named_parts(whole, parameter, values):
                found[part_name] = {
                    "tensor": part,
                    "tp_rank": (
                        parallel_state.get_expert_tensor_parallel_rank()
                        if ".experts." in name
                        else parallel_state.get_tensor_model_parallel_rank()
                    ),
                    "tensor_parallel": bool(getattr(parameter, "tensor_model_parallel", False)),
                    "axis": getattr(parameter, "partition_dim", -1),
                    "stride": getattr(parameter, "partition_stride", 1),
                }
    return found
