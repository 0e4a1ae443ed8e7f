"""CPU versions of ``torch.cuda``: queries, memory statistics, streams, random states."""

import contextlib
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from megasink.cpu import patches


class CpuEvent:
    """An event that completes when it is recorded."""

    def synchronize(self) -> None: ...


class CpuStream:
    """A stream that does nothing: CPU work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.cuda_stream = 0
        self.device = torch.device("cpu")

    def synchronize(self) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> CpuEvent:
        return CpuEvent()


_STREAM = CpuStream()
# validate_args checks the compute capability with tensor parallelism: use A100's. Megatron 0.20
# looks for a GPU by its name while it is imported (core/ssm/ops/gdp/common.py:63).
_PROPERTIES = SimpleNamespace(major=8, minor=0, name="CPU")


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _memory_stats(device: Any = None) -> dict[str, int]:
    stats: dict[str, int] = defaultdict(int)
    resident = psutil.Process().memory_info().rss
    for name in ("allocated", "reserved"):
        stats[f"{name}_bytes.all.current"] = stats[f"{name}_bytes.all.peak"] = resident
    return stats


_GENERATOR = torch.default_generator


# Like upstream's, these return nothing, where the generator's methods return itself or a number.
def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    _GENERATOR.set_state(new_state)


def _manual_seed(seed: int) -> None:
    _GENERATOR.manual_seed(int(seed))


def _seed() -> None:
    _GENERATOR.seed()


RANDOM: dict[str, Callable[..., Any]] = {
    "get_rng_state": lambda device="cuda": _GENERATOR.get_state(),
    "get_rng_state_all": lambda: [_GENERATOR.get_state()],
    "set_rng_state": _set_rng_state,
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed,
    "seed": _seed,
    "seed_all": _seed,
    "initial_seed": _GENERATOR.initial_seed,
}
"""The functions of torch.cuda.random, for the CPU generator."""


def install() -> None:
    """Replace the functions of torch.cuda that Megatron's training loop calls."""
    patches.QUERIES.apply(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=_nothing,
        get_device_properties=lambda device=None: _PROPERTIES,
        synchronize=_nothing,
    )
    for owner in (torch.cuda, torch.cuda.memory):
        patches.MEMORY.apply(owner, memory_stats=_memory_stats)
    patches.STREAMS.apply(
        Stream=CpuStream,
        current_stream=lambda device=None: _STREAM,
        stream=lambda stream: contextlib.nullcontext(),
        # The optimizers of torch 2.11 ask it, which fails without a driver.
        is_current_stream_capturing=lambda: False,
    )
    for owner in (torch.cuda, torch.cuda.random):
        patches.RANDOM.apply(owner, **RANDOM)
    patches.ACCELERATOR.apply(is_available=lambda: False)
