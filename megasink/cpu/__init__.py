"""Run Megatron without CUDA: opt-in, with every rank a gloo process on the CPU.

Megatron-Core asks ``torch.cuda`` for devices, streams, memory and random states, and builds its
tensors on ``"cuda"``. This package handles those calls on the CPU, so that the unmodified training
loop runs on a laptop. It has one file per upstream subsystem; patches.py declares every replacement
with the upstream lines that make it necessary, and ``tests/cpu`` runs that upstream code.

Functions of ``torch.cuda`` are replaced for the whole process: call :func:`activate` in a dedicated
process, before megatron is imported, and never on a machine with a CUDA device.
"""

import ctypes
import os
import re
import sys
from pathlib import Path

from megasink.errors import UserError
from megasink.upstream.patch_register import active, undo

_active = False
_DYNAMO = "TORCHDYNAMO_DISABLE"
_dynamo_before: str | None = None


def cuda_present() -> bool:
    """Return whether a CUDA device is present (queried before anything is replaced)."""
    if _active or not _has_driver():
        return False
    import torch

    return torch.cuda.is_available()


def _has_driver() -> bool:
    """Return whether torch may find a device, without importing torch, which takes seconds."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    if "torch" in sys.modules or Path("/dev/kfd").exists():  # AMD's driver
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def unusable_gpu(index: int | None = 0) -> str | None:
    """Return why PyTorch cannot use this machine's GPU; None if it can or there is none.

    The kernels for device `index` are compared unless it is None: that starts CUDA, after which a
    process must not fork.
    """
    if _active or not _has_driver():
        return None
    import torch

    if torch.cuda.is_available():
        last = torch.cuda.device_count() - 1
        return None if index is None else _without_kernels(min(index, last))
    try:
        torch.cuda.init()
    except AssertionError:  # PyTorch without CUDA
        return None
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        nothing_there = ("no NVIDIA driver", "No CUDA GPUs", "forked subprocess")
        if any(words in reason for words in nothing_there):
            return None
        return (
            f"PyTorch {torch.__version__} cannot use this machine's GPU: {reason} PyTorch for CUDA "
            "13 needs driver 580 or later, or the CUDA forward compatibility package "
            "(docker/README.md, Drivers)"
        )
    return None


def _without_kernels(index: int) -> str | None:
    """Return the reason if this PyTorch has no code for a device."""
    import torch

    # sm_ABC runs on later devices of its major version, compute_ABC (PTX) on every later one.
    built = re.findall(r"(sm|compute)_(\d+)(\d)[a-z]?\b", " ".join(torch.cuda.get_arch_list()))
    has = torch.cuda.get_device_capability(index)
    code = [(kind, (int(major), int(minor))) for kind, major, minor in built]
    if not code or any(has >= c and (k == "compute" or c[0] == has[0]) for k, c in code):
        return None
    least, most = min(c for _, c in code), max(c for _, c in code)
    return (
        f"PyTorch {torch.__version__} has no kernels for {torch.cuda.get_device_name(index)}, of "
        f"compute capability {has[0]}.{has[1]} (it has those of {least[0]}.{least[1]} to "
        f"{most[0]}.{most[1]}): install a PyTorch for another CUDA release (download.pytorch.org)"
    )


def is_active() -> bool:
    """Return whether this process runs on the CPU platform."""
    return _active


def describe() -> str:
    """Return one line for the log that names this process's platform."""
    if _active:
        return "platform: CPU (no CUDA device found): gloo ranks, local modules, no fused kernels"
    return "platform: CUDA"


def activate() -> None:
    """Make Megatron, not yet imported, run on the CPU in this process. Idempotent."""
    global _active, _dynamo_before
    if _active:
        return
    import torch

    if torch.cuda.is_available():
        raise UserError(
            "the CPU platform was requested, but a CUDA device is visible: "
            'hide it (CUDA_VISIBLE_DEVICES="") or drop --device cpu'
        )
    if "megatron.core.tensor_parallel.random" in sys.modules:
        raise UserError(
            "the CPU platform must be activated before megatron is imported: "
            "call megasink.cpu.activate() first"
        )
    from megasink.cpu import cuda_api, cuda_tensors, patches

    # For child processes, too.
    _dynamo_before = os.environ.get(_DYNAMO)
    os.environ[_DYNAMO] = "1"
    patches.COMPILE.apply(disable=True)
    cuda_api.install()
    cuda_tensors.install()
    _active = True
    # These import megatron, which queries torch.cuda at import.
    from megasink.cpu import megatron_core

    megatron_core.install()


def deactivate() -> None:
    """Undo every replacement (for tests)."""
    global _active
    undo(active("platform"))
    if _active:
        os.environ.pop(_DYNAMO)
        os.environ |= {} if _dynamo_before is None else {_DYNAMO: _dynamo_before}
    _active = False
