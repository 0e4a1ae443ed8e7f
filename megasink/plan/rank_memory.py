"""The contents of a rank: its modules and parameters, and its memory by part.

Memory is what the caching allocator of the hollow GPU sees. One rank of each pipeline stage has all
parameters of the model.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.attention import Attention
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megasink.attention.variants import parameter_names
from megasink.attention.variants.gate_options import is_megatrons_output_gate
from megasink.megatron.checkpoint_parts import named_parts

OTHER, GATES, QKV = "other", "attention gates", "attention qkv"
# The first pattern found in a parameter's name counts.
COMPONENTS = {
    "embedding": r"^embedding\.",
    "output layer": r"^output_layer\.",
    "router": r"\.router\.",
    "shared experts": r"\.shared_experts?\.",
    "experts": r"\.experts\.",
    "norms": r"norm",
    "switch heads": r"linear_switch\.",
    GATES: r"gate",
    QKV: r"linear_(qkv|kv|q)(_|\.)",
    "attention output": r"linear_proj\.",
    "MLP": r"\.mlp\.",
}
_GATED_NORM = re.compile(
    r"(linear_qkv|linear_(q|kv)_up_proj|linear_fc1)\.layer_norm_(weight|bias)$"
)


def component(name: str) -> str:
    """Return the component of a parameter: a key of `COMPONENTS`, or `OTHER`."""
    if name.rpartition(".")[2] in parameter_names():
        return "attention sinks and biases"
    if _GATED_NORM.search(name):
        return "norms"
    return next((c for c, pattern in COMPONENTS.items() if re.search(pattern, name)), OTHER)


def count(models: Iterable[Any], padding_rows: int) -> tuple[Counter[str], Counter[str]]:
    """Count the parameters of a rank's model chunks."""
    here: Counter[str] = Counter()
    stage: Counter[str] = Counter()
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    experts = parallel_state.get_expert_model_parallel_world_size()
    expert_tensor = parallel_state.get_expert_tensor_parallel_world_size()
    for model in models:
        first_stage = get_attr_wrapped_model(model, "pre_process")
        for full_name, parameter in model.named_parameters():
            name = re.sub(r"^(module\.)+", "", full_name)
            here[component(name)] += parameter.numel()
            if name.startswith("output_layer.") and getattr(parameter, "shared", False):
                continue  # the last stage's copy of the embedding
            if name.startswith("embedding.") and not first_stage:
                continue  # that of multi-token prediction
            expert = not getattr(parameter, "allreduce", True)
            sharded = getattr(parameter, "tensor_model_parallel", False)
            copies = experts if expert else 1
            if sharded:
                copies *= expert_tensor if expert else tensor
            for part, values in named_parts(name, parameter):
                kind, number = component(part), values.numel() * copies
                layer, of_attention, _ = full_name.partition(".self_attention.")
                options: Any = model.get_submodule(layer).config if of_attention else None
                if kind == QKV and is_megatrons_output_gate(options):
                    # Its rows stand among those of linear_qkv.
                    heads, groups = options.num_attention_heads, options.num_query_groups
                    gates = number * heads // (2 * heads + 2 * groups)
                    stage[GATES] += gates
                    number -= gates
                stage[kind] += number
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                stage[component(name)] -= padding_rows * parameter.shape[1]
    return here, stage


_SKIPPED = ("IdentityOp", "IdentityFuncOp")


def describe(models: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield a record for each block of a rank's model chunks, of which another may hold a half."""
    for model in models:
        layers = get_attr_wrapped_model(model, "decoder").layers
        for block, of_block in itertools.groupby(layers, lambda layer: layer.layer_number):
            yield {"layer": block, **_modules(list(of_block))}


def _modules(layers: list[Any]) -> dict[str, Any]:
    """Return the classes of a block's modules; of a mixer that is not attention, its class."""
    mixers = (getattr(layer, "self_attention", getattr(layer, "mixer", None)) for layer in layers)
    mixer = next((m for m in mixers if m is not None and not _is_skipped(m)), None)
    core = mixer.core_attention if isinstance(mixer, Attention) else None
    every = (getattr(layer, "mlp", None) for layer in layers)
    mlps = [mlp for mlp in every if mlp is not None and not _is_skipped(mlp)]
    named = (pair for layer in layers for pair in layer.named_modules())
    norms = (m for name, m in named if "norm" in name.rpartition(".")[2] and not _is_skipped(m))
    return {
        "attention": [type(module).__name__ for module in (mixer, core) if module is not None],
        "window": getattr(core, "window", None),
        "mlp": [name for mlp in mlps for name in (type(mlp).__name__, *_inside(mlp))],
        "norms": sorted({type(norm).__name__ for norm in norms}),
    }


def _is_skipped(module: Any) -> bool:
    return type(module).__name__ in _SKIPPED


def _inside(mlp: Any) -> Iterator[str]:
    """Yield the class of a mixture's experts."""
    if (experts := getattr(mlp, "experts", None)) is not None:
        yield type(experts).__name__
        yield type(mlp.token_dispatcher).__name__


PARTS = ("parameters", "gradients", "optimizer")


def allocated(which: str = "current") -> int:
    """Return the bytes of all tensors, "current" or at the "peak" since the last reset."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def of_training_state(models: Sequence[Any], optimizer: Any) -> dict[str, int]:
    """Return the bytes of `PARTS`, with the padding of buffers; a shared storage counts once."""
    seen: set[int] = set()
    sizes = dict.fromkeys(PARTS, 0)
    # DistributedDataParallel: `buffers` of a plain module is a method.
    buffers = [b for model in models for b in (*model.buffers, *model.expert_parallel_buffers)]
    parameters = [parameter for model in models for parameter in model.parameters()]
    for part, tensors in (
        ("parameters", parameters + [buffer.param_data for buffer in buffers]),
        ("gradients", [b.grad_data for b in buffers] + [p.grad for p in parameters]),
        ("optimizer", _states(optimizer)),
    ):
        for tensor in tensors:
            storage = None if tensor is None else tensor.untyped_storage()
            if storage and storage.device.type == "cuda" and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[part] += storage.nbytes()
    return sizes


def _states(optimizer: Any) -> Iterator[Tensor]:
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:  # Muon's distributed optimizer is a chain in a chain
        for one in chained:
            yield from _states(one)
        return
    for group in optimizer.optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def held(passes: Sequence[tuple[bool, int, int]]) -> dict[str, int]:
    """Return the memory that microbatches hold for their backward passes."""
    # `passes` are those of a step: whether it is a forward pass, and the bytes before and after it.
    start = passes[0][1]
    most = max(0, *itertools.accumulate(1 if forward else -1 for forward, _, _ in passes))
    held = max(0, *(after - start for _, _, after in passes))
    return {"start": start, "in_flight": most, "each": held // max(most, 1), "held": held}
