"""Tasks for the workers: runs of tiny models, and their conversion."""

import json
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megasink.checkpoint.model import model_config
from megasink.convert.flags import model_flags
from megasink.convert.from_hf import arguments_of, plain
from megasink.layers.builder import MegasinkGPTBuilder
from tests.convert.models import MODELS
from tests.distributed.skewed_gates import skew_gates
from tests.distributed.tiny_gpt import skew_sinks


def save_run(folder: str, name: str, bf16: bool = False, tokenizer: str | None = None) -> None:
    """A run folder with one checkpoint of a model with large, different weights everywhere.

    Args:
        name: of `MODELS`.
    """
    _, architecture = MODELS[name]
    flags = [*model_flags(architecture), *(["--bf16"] if bf16 else [])]
    args, _ = arguments_of(flags)
    args.tensor_model_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    args.pipeline_model_parallel_size = parallel_state.get_pipeline_model_parallel_world_size()
    args.sequence_parallel = bool(architecture.experts) and args.tensor_model_parallel_size > 1
    args.vocab_size = architecture.vocabulary - 1
    args.tokenizer_type = "NullTokenizer"
    if tokenizer is not None:
        args.tokenizer_type, args.tokenizer_model = "HuggingFaceTokenizer", tokenizer
    config = model_config(args)
    config.finalize()
    model = MegasinkGPTBuilder(config).build_model(
        ProcessGroupCollection.use_mpu_process_groups(),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    skew_sinks([model])
    skew_gates([model])
    _skew_norms(model)
    model.to(args.params_dtype)
    checkpoints = Path(folder) / "checkpoints"
    checkpoint = checkpoints / "iter_0000003"
    if torch.distributed.get_rank() == 0:
        checkpoint.mkdir(parents=True)
        saved = {key: plain(value) for key, value in vars(args).items()}
        (Path(folder) / "config.json").write_text(json.dumps({"arguments": saved}))
        (checkpoints / "latest_checkpointed_iteration.txt").write_text("3")
    torch.distributed.barrier()
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"model": model.sharded_state_dict(metadata=groups)}
    dist_checkpointing.save(state, str(checkpoint), ("torch_dist", 1))


def _skew_norms(model: torch.nn.Module) -> None:
    """Weights between 0.6 and 1.9, the same under every layout, in steps that bf16 has."""
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.dim() == 1:
            steps = torch.arange(parameter.numel()) % 9
            parameter.data.copy_(0.625 + steps / 8)
        if name.endswith("bias") and parameter.dim() == 1:
            steps = torch.arange(parameter.numel()) % 5
            parameter.data.copy_((steps - 2) / 8)
