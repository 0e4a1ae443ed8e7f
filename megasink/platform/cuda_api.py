"""``torch.cuda`` answered for a CPU: queries, memory statistics, streams, events, random states."""

import contextlib
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from megasink.platform.patching import replace


class CpuStream:
    """A stream that does nothing: CPU work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.cuda_stream = 0
        self.device = torch.device("cpu")

    def synchronize(self) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: "CpuEvent | None" = None) -> "CpuEvent":
        event = CpuEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> "CpuStream":
        return self

    def __exit__(self, *exc: Any) -> None: ...


class CpuEvent:
    """An event that remembers when it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "CpuEvent") -> float:
        """Milliseconds, as torch.cuda.Event answers."""
        return 1e3 * (end._seconds - self._seconds)


_STREAM = CpuStream()


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="CPU",
        major=8,
        minor=0,
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=psutil.cpu_count() or 1,
        uuid="cpu",
    )


def _memory_info(device: Any = None) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _resident_bytes(device: Any = None) -> int:
    return psutil.Process().memory_info().rss


def _memory_stats(device: Any = None) -> dict[str, int]:
    stats: dict[str, int] = defaultdict(int)
    stats["allocated_bytes.all.current"] = stats["allocated_bytes.all.peak"] = _resident_bytes()
    return stats


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def install() -> None:
    """Replace the functions of torch.cuda that Megatron's training loop calls."""
    answer: Any
    queries = "megatron/training/initialize.py:57,270,280; megatron/training/training.py:1131"
    for name, answer in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *a, **k: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _nothing,
        "get_device_name": lambda device=None: "CPU",
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_properties": _properties,
        "init": _nothing,
        "_lazy_init": _nothing,
        "synchronize": _nothing,
        "is_current_stream_capturing": lambda: False,
    }.items():
        replace(torch.cuda, name, answer, upstream=queries, reason="device queries")

    memory = "megatron/training/utils/common_utils.py:313; megatron/training/training.py:2787"
    for name, answer in {
        "empty_cache": _nothing,
        "memory_allocated": _resident_bytes,
        "max_memory_allocated": _resident_bytes,
        "memory_reserved": _resident_bytes,
        "max_memory_reserved": _resident_bytes,
        "reset_peak_memory_stats": _nothing,
        "memory_stats": _memory_stats,
        "mem_get_info": _memory_info,
    }.items():
        replace(torch.cuda, name, answer, upstream=memory, reason="resident memory of the process")

    streams = (
        "megatron/core/distributed/param_and_grad_buffer.py; megatron/core/timers.py:113; "
        "megatron/core/pipeline_parallel/schedules.py"
    )
    for name, answer in {
        "Stream": CpuStream,
        "Event": CpuEvent,
        "current_stream": lambda device=None: _STREAM,
        "default_stream": lambda device=None: _STREAM,
        "stream": lambda stream: contextlib.nullcontext(),
        "set_stream": _nothing,
    }.items():
        replace(torch.cuda, name, answer, upstream=streams, reason="the CPU has one order of work")
    for name in ("range_push", "range_pop", "mark"):
        replace(
            torch.cuda.nvtx,
            name,
            _nothing,
            upstream="megatron/core/utils.py nvtx_range_push",
            reason="there is no profiler to mark",
        )

    rng = "megatron/core/tensor_parallel/random.py:104,149,324"
    for owner in (torch.cuda, torch.cuda.random):
        for name, answer in {
            "get_rng_state": _get_rng_state,
            "set_rng_state": _set_rng_state,
            "manual_seed": _manual_seed,
            "manual_seed_all": _manual_seed,
        }.items():
            replace(
                owner, name, answer, upstream=rng, reason="dropout draws from the CPU generator"
            )

    # torch.accelerator is compiled against CUDA: asked for a device it calls the driver.
    accelerator = "torch/accelerator/__init__.py current_device_index, from DCP and DataLoader"
    for name, answer in {
        "is_available": lambda: False,
        "device_count": lambda: 0,
        "current_accelerator": lambda check_available=False: None,
        "current_device_index": lambda: 0,
        "synchronize": _nothing,
    }.items():
        replace(torch.accelerator, name, answer, upstream=accelerator, reason="there is none")
