"""The machine that runs a grid, in a few words."""

import os
import platform
from pathlib import Path


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def hardware() -> str:
    """Return the processor, the cores that this process may use, and the GPUs."""
    processor = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else processor}, {cores()} cores{_gpus()}"


def _gpus() -> str:
    """Return the GPUs by the driver's files: CUDA would take memory of the runs."""
    texts = [path.read_text() for path in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("Model:")]
    names = [line.partition(":")[2].strip() for line in lines]
    counted = {name: names.count(name) for name in names}
    return "".join(f", {count} x {name}" for name, count in counted.items())
