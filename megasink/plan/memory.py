"""Memory of a rank by part, as the caching allocator of the hollow GPU sees it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

PARTS = ("parameters", "gradients", "optimizer")


def allocated(which: str = "current") -> int:
    """Return the bytes of all tensors, "current" or at the "peak" since the last reset."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def reserved() -> int:
    """Return the peak of the allocator's memory on the device, gaps included."""
    return int(torch.cuda.memory_stats()["reserved_bytes.all.peak"])


def of_training_state(models: Sequence[Any], optimizer: Any) -> dict[str, int]:
    """Return the bytes of `PARTS`, with the padding of buffers; a shared storage counts once."""
    seen: set[int] = set()
    sizes = dict.fromkeys(PARTS, 0)
    for part, tensors in (
        ("parameters", _parameters(models)),
        ("gradients", _gradients(models)),
        ("optimizer", _states(optimizer)),
    ):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == "cuda" and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[part] += storage.nbytes()
    return sizes


def _buffers(models: Sequence[Any]) -> Iterator[Any]:
    for model in models:  # DistributedDataParallel: `buffers` of a plain module is a method
        yield from (*model.buffers, *model.expert_parallel_buffers)


def _parameters(models: Sequence[Any]) -> Iterator[Tensor]:
    for model in models:
        yield from model.parameters()
    for buffer in _buffers(models):
        if buffer.param_data is not None:
            yield buffer.param_data


def _gradients(models: Sequence[Any]) -> Iterator[Tensor]:
    for buffer in _buffers(models):
        if buffer.grad_data is not None:
            yield buffer.grad_data
    for model in models:
        yield from (p.grad for p in model.parameters() if p.grad is not None)


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
    """Return the memory that microbatches hold for their backward passes.

    `passes` are those of a step: whether it is a forward pass, and the bytes before and after it.
    """
    start = passes[0][1]
    flying = most = held = 0
    for forward, _, after in passes:
        flying += 1 if forward else -1
        most = max(most, flying)
        held = max(held, after - start)
    return {"start": start, "in_flight": most, "each": held // max(most, 1), "held": held}
