"""Initial weights that do not depend on the parallel layout.

Megatron draws each rank's shard from a generator that depends on the tensor- and pipeline-parallel
rank, so the same seed gives a different model under another layout. Here each weight is drawn in
full from a generator seeded by the run's seed and the weight's name in the whole model, and each
rank keeps its shard.
"""

import hashlib
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import init_method_normal
from torch import Tensor

from megasink.attention.variants import Parameter, variant
from megasink.megatron.checkpoint_parts import named_parts
from megasink.megatron.config import MegasinkTransformerConfig

InitMethod = Callable[[Tensor], Tensor]
_SCALED_OUTPUT = re.compile(r"(linear_proj|linear_fc2|self_attention\.out_proj)\.weight$")
_EMBEDDING = re.compile(r"(word_embeddings|position_embeddings)\.weight$")
# Megatron also draws the router bias (transformer/moe/router.py:80).
_DRAWN = re.compile(
    r"((linear_qkv|linear_q_proj|linear_(q|kv)_(down|up)_proj|linear_gate|linear_switch|linear_fc1"
    r"|eh_proj|output_layer|similarity_mlp\.fc[12]|relative_bias)\.weight"
    r"|router\.(weight|bias)|\.gate_weight|self_attention\.in_proj\.weight)$"
)
# Of gated delta-net (ssm/gated_delta_net/common.py:reset_parameters), and all of Mamba.
_DELTA_CONVOLUTION, _DELTA_DECAY = ".self_attention.conv1d.weight", ".self_attention.A_log"
_MAMBA = ".mixer."
# Sequential experts, and TransformerEngine's grouped experts: (before, index on this rank, after).
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)local_experts\.(\d+)\.(.*)")
_GROUPED_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(linear_fc[12])\.(weight|bias)(\d+)")


def global_names(model: Any) -> dict[str, str]:
    """Map each parameter name on this rank to its name in the whole model.

    Blocks and experts are numbered from 0; sequential and grouped experts have the same names.
    """
    offsets = {
        name: module.layer_number - 1
        for name, module in model.named_modules()
        if isinstance(module, TransformerLayer | MambaLayer)
    }
    names = {}
    for name, _ in model.named_parameters():
        layer = re.match(r"(.*layers\.)(\d+)(\..*)", name)
        global_name = name
        if layer and (local := layer[1] + layer[2]) in offsets:
            global_name = f"{layer[1]}{offsets[local]}{layer[3]}"
        elif name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            # The last stage's copy of the embedding must start equal to the first stage's.
            global_name = "embedding.word_embeddings.weight"
        names[name] = _expert_name(global_name, model.config)
    return names


def _expert_name(name: str, config: MegasinkTransformerConfig) -> str:
    if grouped := _GROUPED_EXPERT.fullmatch(name):
        name = f"{grouped[1]}local_experts.{grouped[4]}.{grouped[2]}.{grouped[3]}"
    if expert := _EXPERT.fullmatch(name):
        # Every rank holds consecutive experts.
        ranks = parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * config.num_moe_experts // ranks
        name = f"{expert[1]}local_experts.{first + int(expert[2])}.{expert[3]}"
    return name


def initialize_weights(model: Any, seed: int) -> None:
    """Redraw every random weight of a newly built stage, independently of the layout.

    Constant initial values are left unchanged: norms, linear biases, sinks, gates without an input,
    and variant parameters with a std of 0. So are Mamba layers: theirs are Megatron's, which depend
    on the layout.

    Args:
        model: Pipeline stage, before Float16Module and DDP; on its final device or the CPU.
        seed: Seed of the run.
    """
    names = global_names(model)
    for name, parameter in model.named_parameters():
        method = _init_method(names[name], model.config)
        if method is None:
            known = _MAMBA in name or _of_variant(names[name], model.config) is not None
            if parameter.dim() > 1 and not known:
                raise ValueError(
                    f"megasink does not know how Megatron initializes {name}: "
                    "its value would depend on the layout"
                )
            continue
        for part_name, part in named_parts(names[name], parameter):
            _draw(part, parameter, method, part_name, seed, model.config.gated_linear_unit)


def _init_method(name: str, config: MegasinkTransformerConfig) -> InitMethod | None:
    method: InitMethod | None = None
    if _SCALED_OUTPUT.search(name):
        method = config.output_layer_init_method
    elif config.zero_init_outputs and name == "output_layer.weight":
        method = torch.nn.init.zeros_
    elif _EMBEDDING.search(name):
        method = config.embedding_init_method
    elif _DRAWN.search(name):
        method = config.init_method
    elif name.endswith(_DELTA_CONVOLUTION):
        method = _as_in_torch
    elif name.endswith(_DELTA_DECAY):
        method = _decay
    elif (added := _of_variant(name, config)) is not None and added.std:
        method = init_method_normal(added.std)  # regardless of --init-method-std
    return method


def _as_in_torch(weight: Tensor) -> Tensor:
    """Draw as torch.nn.Conv1d does."""
    return torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def _decay(a_log_H: Tensor) -> Tensor:
    """Draw the decay of the heads of gated delta-net, whose exponential is in [1, 16)."""
    return a_log_H.uniform_(1, 16).log_()


def _of_variant(name: str, config: MegasinkTransformerConfig) -> Parameter | None:
    """Return the variant's record of a parameter; None if it is not from the variant."""
    module, _, last = name.rpartition(".")
    added = {p.name: p for p in variant(config.attention_variant).parameters}
    return added.get(last) if module.endswith(".core_attention") else None


@torch.no_grad()
def _draw(
    part: Tensor,
    parameter: torch.nn.Parameter,
    method: InitMethod,
    name: str,
    seed: int,
    gated: bool,
) -> None:
    """Draw the part of a parameter that has this name."""
    axis, stride, world, rank = 0, 1, 1, 0
    if getattr(parameter, "tensor_model_parallel", False):
        axis = getattr(parameter, "partition_dim", 0)
        # A gated linear_fc1 is [gate; up] on every rank; TE's grouped layer does not mark this.
        stride = 2 if gated and name.endswith("linear_fc1.weight") else 1
        if _EXPERT.fullmatch(name):
            group = parallel_state.get_expert_tensor_parallel_group()
        else:
            group = parallel_state.get_tensor_model_parallel_group()
        world, rank = group.size(), group.rank()
    shape = list(part.shape)
    shape[axis] *= world
    unsharded = torch.empty(shape, dtype=torch.float32, device=part.device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # Megatron's init methods draw from the default generator of the device.
    devices = [] if part.device.type == "cpu" else [part.device]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        method(unsharded)
    pieces = unsharded.chunk(world * stride, dim=axis)
    part.copy_(torch.cat(pieces[rank::world], dim=axis))
