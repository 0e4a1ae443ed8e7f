"""How many ranks a start has on this machine, by its flags and the run's last start."""

import math
from collections.abc import Sequence
from pathlib import Path

from megasink import platform
from megasink.train.last_start import last_start


def ranks_of_last_start(run_dir: Path, flags: Sequence[str]) -> int | None:
    """As many as the last start had, if it was on one machine and these flags allow it here."""
    last = last_start(run_dir)
    ranks = int(last.get("world_size", 0))
    if not ranks or last.get("local_world_size", ranks) != ranks:
        return None
    on_cuda = "--cpu" not in flags and _cuda_devices()
    if on_cuda and ranks > on_cuda:
        return None
    return None if ranks % _layout(flags) else ranks


def default_ranks(flags: Sequence[str]) -> int:
    """One for each CUDA device, else one replica of the model."""
    if "--cpu" not in flags and (devices := _cuda_devices()):
        return devices
    return _layout(flags)


def value_of(flags: Sequence[str], name: str, default: int) -> int:
    """The whole number behind a flag; `default` where it is not given or no number."""
    for flag, value in zip(flags, [*flags[1:], ""], strict=True):
        text = flag.removeprefix(f"{name}=") if flag.startswith(f"{name}=") else value
        if (flag == name or flag.startswith(f"{name}=")) and text.isdigit():
            default = int(text)  # the last one counts, as in argparse
    return default


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if platform.cuda_present() else 0


def _layout(flags: Sequence[str]) -> int:
    """Ranks that hold one replica of the model."""
    kinds = ("tensor-model", "pipeline-model", "context")
    return math.prod(value_of(flags, f"--{kind}-parallel-size", 1) for kind in kinds)
