"""Initial weights that do not depend on the parallel layout.

Megatron draws each rank's shard from a generator that depends on the tensor- and pipeline-parallel
rank, so the same seed starts another model under another layout. Here every weight is drawn whole
from a generator seeded by the run's seed and the weight's name in the whole model, and each rank
keeps its shard.
"""

import hashlib
import re
from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megasink.layers.transformer_config import MegasinkTransformerConfig

InitMethod = Callable[[Tensor], Tensor]
_SCALED_OUTPUT = re.compile(r"(linear_proj|linear_fc2)\.weight$")
_EMBEDDING = re.compile(r"(word_embeddings|position_embeddings)\.weight$")
_DRAWN = re.compile(r"(linear_qkv|linear_fc1|output_layer|relative_bias)\.weight$")


def global_names(model: GPTModel) -> dict[str, str]:
    """Parameter name on this rank -> its name in the whole model (layers counted from 0)."""
    offsets = {
        name: module.layer_number - 1
        for name, module in model.named_modules()
        if isinstance(module, TransformerLayer)
    }
    names = {}
    for name, _ in model.named_parameters():
        layer = re.match(r"(.*layers\.)(\d+)(\..*)", name)
        whole = name
        if layer and (local := layer[1] + layer[2]) in offsets:
            whole = f"{layer[1]}{offsets[local]}{layer[3]}"
        elif name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            # The last stage's copy of the embedding must start equal to the first stage's.
            whole = "embedding.word_embeddings.weight"
        names[name] = whole
    return names


def initialize_weights(model: GPTModel, seed: int) -> None:
    """Draw every random weight of a freshly built stage again, independently of the layout.

    Norms, biases and sinks start as constants and are left alone.

    Args:
        model: one pipeline stage, before Float16Module and DDP; on its final device or the CPU.
        seed: of the run.

    Raises:
        ValueError: a weight that is not constant and whose initialisation is not known here.
    """
    names = global_names(model)
    for name, parameter in model.named_parameters():
        method = _init_method(names[name], model.config)
        if method is None:
            if parameter.dim() > 1:
                raise ValueError(
                    f"megasink does not know how Megatron initialises {name}: "
                    "its value would depend on the layout"
                )
            continue
        _draw(parameter, method, names[name], seed)


def _init_method(name: str, config: MegasinkTransformerConfig) -> InitMethod | None:
    method: InitMethod | None = None
    if _SCALED_OUTPUT.search(name):
        method = config.output_layer_init_method
    elif _EMBEDDING.search(name):
        method = config.embedding_init_method
    elif _DRAWN.search(name):
        method = config.init_method
    return method


@torch.no_grad()
def _draw(parameter: torch.nn.Parameter, method: InitMethod, name: str, seed: int) -> None:
    sharded = getattr(parameter, "tensor_model_parallel", False)
    axis: int = getattr(parameter, "partition_dim", 0) if sharded else 0
    stride: int = getattr(parameter, "partition_stride", 1) if sharded else 1
    world = parallel_state.get_tensor_model_parallel_world_size() if sharded else 1
    rank = parallel_state.get_tensor_model_parallel_rank() if sharded else 0
    shape = list(parameter.shape)
    shape[axis] *= world
    whole = torch.empty(shape, dtype=torch.float32, device=parameter.device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # The init methods of Megatron draw from the default generator of the device.
    devices = [] if parameter.device.type == "cpu" else [parameter.device]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        method(whole)
    # partition_stride 2: the shard of a gated linear_fc1 is [gate; up] of its own columns.
    pieces = whole.chunk(world * stride, dim=axis)
    parameter.copy_(torch.cat(pieces[rank::world], dim=axis))
