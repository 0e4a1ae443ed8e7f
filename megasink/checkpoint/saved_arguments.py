"""The arguments of a run, read back from its config.json for a single process.

config.json, and not the checkpoint, is read: a checkpoint holds its arguments as a pickle, and
unpickling runs whatever code the file asks for.
"""

import enum
import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megasink.errors import UserError
from megasink.parser import CPU_DEFAULTS, defaults

# The layout, and how to compute rather than what: the values of this process count. Whatever is
# not named here is taken from the run, so that no option of a model can be forgotten.
_THIS_PROCESS = frozenset(
    """
    rank world_size local_rank data_parallel_size inprocess_active_world_size
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    transformer_pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    pipeline_model_parallel_layout microbatch_group_size_per_vp_stage
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    expert_model_parallel_size expert_tensor_parallel_size
    tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards
    sequence_parallel overlap_p2p_comm tp_comm_overlap defer_embedding_wgrad_compute
    recompute_granularity recompute_method recompute_num_layers recompute_modules
    fine_grained_activation_offloading offload_modules cpu_offloading_num_layers
    gradient_accumulation_fusion inference_cuda_graph_scope attention_backend
    attention_kernel flash_decode perform_initialization unknown_flags run_dir resume cpu
    """.split()
)
# A model trained with TransformerEngine's fused modules, or in fp8, runs on Megatron's own modules
# and in its own dtype on any machine; a checkpoint is the same for both.
_PLAIN_MODULES = {**CPU_DEFAULTS, "fp8": None, "fp4": None, "fp8_param_gather": False}


def read_arguments(config: Path) -> dict[str, Any]:
    """What a run's config.json says of its arguments.

    Raises:
        UserError: it cannot be read, or is not one of megasink's.
    """
    try:
        saved = dict(json.loads(config.read_text())["arguments"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{config} is no configuration of a run of megasink ({error!r})") from error
    missing = {"attention_variant", "padded_vocab_size", "ffn_hidden_size"} - set(saved)
    if missing:
        raise UserError(f"{config} is of no run of megasink: no {', '.join(sorted(missing))}")
    return saved


def single_process_arguments(saved: Mapping[str, Any]) -> Namespace:
    """Megatron's arguments for the same model, whole in one process.

    Args:
        saved: of :func:`read_arguments`, as a finished validation left them.
    """
    args = defaults()
    for name, value in saved.items():
        # Data types: that of the parameters follows below, the others are the optimizer's.
        if name not in _THIS_PROCESS and not str(value).startswith("torch."):
            setattr(args, name, _typed(getattr(args, name, None), value))
    vars(args).update(_PLAIN_MODULES)
    if args.window_size is not None:
        args.window_size = tuple(args.window_size)
    args.params_dtype = (
        torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    )
    args.perform_initialization = False  # the weights come from the checkpoint
    args.virtual_pipeline_model_parallel_size = None
    return args


def _typed(default: Any, value: Any) -> Any:
    """A value of JSON as argparse would have made it."""
    if isinstance(default, enum.Enum) and isinstance(value, str):
        return type(default)[value]
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    return value
